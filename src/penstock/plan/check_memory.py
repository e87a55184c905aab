"""The part of the check that looks at device memory: blocks, ranges, and what is filled once and for all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.plan.plan import Piece, Plan
from penstock.weight import Weight

# What device allocators give and kernels expect. The planner has a number of its own.
_ALIGNMENT_BYTES = 256

# Consecutive ring pages: the first block, and the one after the last.
Pages = tuple[int, int]
# A stretch of a resident block: the block, the offset in it, the length, and the offset from the start asked for.
Span = tuple[int, int, int, int]


class _Extent(NamedTuple):
    """A stretch of a range: one resident block, or ring pages whose numbers follow one another."""

    begin_bytes: int
    end_bytes: int
    block: int
    is_ring: bool


def whole(value: object, low: int, high: int, what: str) -> int:
    """A number that must lie in [low, high)."""
    if type(value) is not int or not low <= value < high:
        raise PlanError(f"{what} is {value!r}; it must be a whole number in [{low}, {high})")
    return value


class Layout:
    """Ranges as a few extents, however many pages they have, so that what a stretch of one lies on is found at once."""

    def __init__(self, plan: Plan) -> None:
        page_bytes = plan.page_bytes
        if type(page_bytes) is not int or page_bytes < 1:
            raise PlanError(f"the plan's pages have {page_bytes!r} bytes; a page has one at the least")
        self.page_bytes = page_bytes
        # Where pages are finer, ranges begin on a page and no more.
        self.alignment_bytes = page_bytes if page_bytes % _ALIGNMENT_BYTES else _ALIGNMENT_BYTES
        for index, block in enumerate(plan.blocks):
            if type(block.nbytes) is not int or block.nbytes <= 0 or block.nbytes % page_bytes:
                raise PlanError(f"block {index} has {block.nbytes!r} bytes, which is not a number of pages")
            if block.ring and block.nbytes != page_bytes:
                raise PlanError(f"ring block {index} has {block.nbytes} bytes; a page has {page_bytes}")
        self._range_bytes: list[int] = []
        self._extents: list[list[_Extent]] = []
        mapped: set[int] = set()
        for index, one in enumerate(plan.ranges):
            are_whole = set(map(type, one.blocks)) <= {int}
            if not are_whole or (one.blocks and not 0 <= min(one.blocks) <= max(one.blocks) < len(plan.blocks)):
                raise PlanError(f"range {index} maps a block that is none of the plan's {len(plan.blocks)}")
            if len(set(one.blocks)) != len(one.blocks):
                raise PlanError(f"range {index} maps a block twice")
            mapped.update(one.blocks)
            extents = self._extents_of(plan, one.blocks)
            covered = extents[-1].end_bytes if extents else 0
            if covered != one.nbytes:
                raise PlanError(f"range {index} has {one.nbytes} bytes, but its blocks have {covered}")
            self._range_bytes.append(covered)
            self._extents.append(extents)
        unmapped = set(range(len(plan.blocks))) - mapped
        if unmapped:
            raise PlanError(f"blocks that no range maps: {sorted(unmapped)[:8]}")

    def _extents_of(self, plan: Plan, blocks: Iterable[int]) -> list[_Extent]:
        extents: list[_Extent] = []
        begin = end = 0
        first, previous = -1, -2
        page_bytes, every = self.page_bytes, plan.blocks
        for block in blocks:
            if block == previous + 1 and every[block].ring:
                end += page_bytes
                previous = block
                continue
            if first >= 0:
                extents.append(_Extent(begin, end, first, every[first].ring))
            # A resident block is never merged with what follows it.
            first, previous, begin = block, block if every[block].ring else -2, end
            end += every[block].nbytes
        if first >= 0:
            extents.append(_Extent(begin, end, first, every[first].ring))
        return extents

    @property
    def range_count(self) -> int:
        return len(self._extents)

    def stretch(self, range_index: int, offset_bytes: int, nbytes: int) -> tuple[list[Pages], list[Span]]:
        """The ring pages and the parts of resident blocks that a stretch of a range lies on."""
        whole(range_index, 0, len(self._extents), "the index of a range")
        if (
            type(offset_bytes) is not int
            or type(nbytes) is not int
            or offset_bytes < 0
            or nbytes < 0
            or offset_bytes + nbytes > self._range_bytes[range_index]
        ):
            raise PlanError(f"{nbytes} bytes at {offset_bytes} are not all within range {range_index}")
        pages: list[Pages] = []
        spans: list[Span] = []
        extents = self._extents[range_index]
        end_bytes = offset_bytes + nbytes
        at = bisect_right(extents, offset_bytes, key=lambda extent: extent.begin_bytes) - 1
        while nbytes and at < len(extents) and extents[at].begin_bytes < end_bytes:
            begin, end, block, is_ring = extents[at]
            low, high = max(begin, offset_bytes), min(end, end_bytes)
            if is_ring:
                page = block - begin // self.page_bytes
                pages.append((page + low // self.page_bytes, page + -(-high // self.page_bytes)))
            else:
                spans.append((block, low - begin, high - low, low - offset_bytes))
            at += 1
        return pages, spans


def check_piece(piece: Piece, weights: Mapping[str, Weight]) -> None:
    if piece.weight not in weights:
        raise PlanError(f"a piece is of {piece.weight!r}, which is not a weight")
    if type(piece.nbytes) is not int or type(piece.weight_offset_bytes) is not int:
        raise PlanError(f"a piece of {piece.weight!r} is no number of bytes: {piece}")
    if piece.nbytes <= 0 or piece.weight_offset_bytes < 0:
        raise PlanError(f"a piece of {piece.weight!r} has {piece.nbytes} bytes at {piece.weight_offset_bytes}")
    if piece.weight_offset_bytes + piece.nbytes > weights[piece.weight].nbytes:
        raise PlanError(f"a piece of {piece.weight!r} goes beyond its end")


# Resident bytes by block: stretches (offset in the block, length, weight, offset in the weight), in their order.
Filled = dict[int, list[tuple[int, int, str, int]]]


def check_fills(plan: Plan, layout: Layout, weights: Mapping[str, Weight]) -> Filled:
    filled: Filled = {}
    for piece in plan.fills:
        check_piece(piece, weights)
        pages, spans = layout.stretch(piece.range_index, piece.range_offset_bytes, piece.nbytes)
        if pages:
            raise PlanError(f"the fill of {piece.weight!r} writes to ring block {pages[0][0]}")
        for block, offset, length, ahead in spans:
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
