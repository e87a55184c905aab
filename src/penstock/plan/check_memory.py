"""The part of the check that looks at device memory: blocks, ranges, and what is filled once and for all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise

from penstock.errors import PenstockError
from penstock.plan.plan import Piece, Plan
from penstock.weight import Weight


class PlanError(PenstockError):
    """A plan breaks one of its own rules."""


def check_memory(plan: Plan) -> None:
    mapped: set[int] = set()
    for index, block in enumerate(plan.blocks):
        if block.nbytes <= 0 or block.nbytes % plan.page_bytes:
            raise PlanError(f"block {index} has {block.nbytes} bytes, which is not a number of pages")
        if block.ring and block.nbytes != plan.page_bytes:
            raise PlanError(f"ring block {index} has {block.nbytes} bytes; a page has {plan.page_bytes}")
    for index, one in enumerate(plan.ranges):
        covered = sum(plan.blocks[block].nbytes for block in one.blocks)
        if covered != one.nbytes:
            raise PlanError(f"range {index} has {one.nbytes} bytes, but its blocks have {covered}")
        if len(set(one.blocks)) != len(one.blocks):
            raise PlanError(f"range {index} maps a block twice")
        mapped.update(one.blocks)
    unmapped = set(range(len(plan.blocks))) - mapped
    if unmapped:
        raise PlanError(f"blocks that no range maps: {sorted(unmapped)[:8]}")


def spans(plan: Plan, range_index: int, offset_bytes: int, nbytes: int) -> list[tuple[int, int, int, int]]:
    """(block, offset in the block, length, offset from the start asked for) of a stretch of a range."""
    found: list[tuple[int, int, int, int]] = []
    begin = 0
    for block in plan.ranges[range_index].blocks:
        end = begin + plan.blocks[block].nbytes
        low, high = max(begin, offset_bytes), min(end, offset_bytes + nbytes)
        if low < high:
            found.append((block, low - begin, high - low, low - offset_bytes))
        begin = end
    if sum(length for _, _, length, _ in found) != nbytes:
        raise PlanError(f"{nbytes} bytes at {offset_bytes} are not all within range {range_index}")
    return found


def check_piece(plan: Plan, piece: Piece, weights: Mapping[str, Weight]) -> None:
    if piece.nbytes <= 0 or piece.weight_offset_bytes < 0:
        raise PlanError(f"a piece of {piece.weight!r} has {piece.nbytes} bytes at {piece.weight_offset_bytes}")
    if piece.weight_offset_bytes + piece.nbytes > weights[piece.weight].nbytes:
        raise PlanError(f"a piece of {piece.weight!r} goes beyond its end")


# Resident bytes by block: stretches (offset in the block, length, weight, offset in the weight), in their order.
Filled = dict[int, list[tuple[int, int, str, int]]]


def check_fills(plan: Plan, weights: Mapping[str, Weight]) -> Filled:
    filled: Filled = {}
    for piece in plan.fills:
        check_piece(plan, piece, weights)
        for block, offset, length, ahead in spans(plan, piece.range_index, piece.range_offset_bytes, piece.nbytes):
            if plan.blocks[block].ring:
                raise PlanError(f"the fill of {piece.weight!r} writes to ring block {block}")
            filled.setdefault(block, []).append((offset, length, piece.weight, piece.weight_offset_bytes + ahead))
    for block, stretches in filled.items():
        stretches.sort()
        for (offset, length, name, _), (after, _, other, _) in pairwise(stretches):
            if offset + length > after:
                raise PlanError(f"the fills of {name!r} and {other!r} overlap in block {block}")
    return filled


def resident_matches(filled: Filled, block: int, offset: int, length: int, name: str, weight_offset: int) -> bool:
    stretches = filled.get(block, [])
    # Stretches do not overlap: the last one that begins at or before the offset is the only one that can hold it.
    index = bisect_right(stretches, offset, key=lambda stretch: stretch[0]) - 1
    if index < 0:
        return False
    begin, size, filled_name, filled_offset = stretches[index]
    return offset + length <= begin + size and filled_name == name and filled_offset + offset - begin == weight_offset
