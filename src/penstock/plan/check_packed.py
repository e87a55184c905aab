"""The part of the check that looks at packed weights: their slots, what stays packed, and what of each copy crosses the
link. No code of the planner's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.errors import PlanError
from penstock.plan.check_memory import check_piece, whole
from penstock.plan.plan import Copy, Plan
from penstock.weight import Weight

_BLOCK_BYTES = 64 * 1024
# Kernels read and write sixteen bytes at a time.
_UNIT_BYTES = 16


def check_packed(plan: Plan, weights: Mapping[str, Weight], begins: Mapping[str, Sequence[int]]) -> None:
    """`begins`: by packed weight, where its blocks begin, and where the last ends. Pieces of copies must be sound."""
    rooms = _slot_rooms(plan) + _store_rooms(plan, weights, begins)
    for (one, _, end), (other, begin, _) in pairwise(sorted(rooms)):
        if one == other and end > begin:
            raise PlanError(f"two rooms of packed weights overlap in range {one}")
    _check_alone(plan, {room[0] for room in rooms})
    stored: dict[str, list[tuple[int, int]]] = {}
    for store in plan.stores:
        begin = store.piece.weight_offset_bytes
        stored.setdefault(store.piece.weight, []).append((begin, begin + store.piece.nbytes))
    for method in plan.methods:
        for index, copy in enumerate(method.copies):
            what = f"method {method.method!r}, copy {index} of {copy.piece.weight!r}"
            _check_copy(plan, copy, begins.get(copy.piece.weight), stored.get(copy.piece.weight, []), what)
        for placement in method.placements:
            if placement.weight in begins and placement.in_place_bytes:
                raise PlanError(
                    f"method {method.method!r} reads {placement.weight!r} in host memory, where it is packed"
                )


def _slot_rooms(plan: Plan) -> list[tuple[int, int, int]]:
    slots = plan.slots
    if slots is None:
        return []
    whole(slots.range_index, 0, len(plan.ranges), "the range of slots")
    whole(slots.count, 2, 2**31, "the number of slots, of which one is filled while another is decoded")
    whole(slots.nbytes, _UNIT_BYTES, plan.ranges[slots.range_index].nbytes // slots.count + 1, "the size of a slot")
    if slots.nbytes % _UNIT_BYTES:
        raise PlanError(f"slots have {slots.nbytes} bytes, which is not a multiple of {_UNIT_BYTES}")
    return [(slots.range_index, 0, slots.count * slots.nbytes)]


def _store_rooms(
    plan: Plan, weights: Mapping[str, Weight], begins: Mapping[str, Sequence[int]]
) -> list[tuple[int, int, int]]:
    rooms: list[tuple[int, int, int]] = []
    for store in plan.stores:
        piece = store.piece
        what = f"what stays packed of {piece.weight!r}"
        check_piece(piece, weights)
        if piece.weight not in begins:
            raise PlanError(f"{what}: that is not packed in the file")
        needed = _packed_bytes(begins[piece.weight], piece.weight_offset_bytes, piece.nbytes)
        if store.packed_bytes != needed:
            raise PlanError(f"{what} has {store.packed_bytes!r} bytes; its blocks have {needed}")
        whole(piece.range_index, 0, len(plan.ranges), f"{what}: its range")
        room_bytes = plan.ranges[piece.range_index].nbytes
        whole(piece.range_offset_bytes, 0, room_bytes - needed + 1, f"{what}: its offset")
        if piece.range_offset_bytes % _UNIT_BYTES:
            raise PlanError(f"{what} begins at byte {piece.range_offset_bytes}, not at a multiple of {_UNIT_BYTES}")
        rooms.append((piece.range_index, piece.range_offset_bytes, piece.range_offset_bytes + needed))
    return rooms


def _packed_bytes(begins: Sequence[int], begin_bytes: int, nbytes: int) -> int:
    return begins[(begin_bytes + nbytes - 1) // _BLOCK_BYTES + 1] - begins[begin_bytes // _BLOCK_BYTES]


def _check_alone(plan: Plan, ranges: set[int]) -> None:
    """Nothing else has an address there: neither through another range, nor in these."""
    blocks = [block for index in ranges for block in plan.ranges[index].blocks]
    if any(plan.blocks[block].ring for block in blocks):
        raise PlanError("packed weights lie in a block of the ring")
    others = {block for index, one in enumerate(plan.ranges) if index not in ranges for block in one.blocks}
    if len(set(blocks)) != len(blocks) or others & set(blocks):
        raise PlanError("a block of packed weights is mapped into two ranges")
    used = [piece.range_index for piece in plan.fills]
    for method in plan.methods:
        used += [copy.piece.range_index for copy in method.copies]
        used += [placement.range_index for placement in method.placements if placement.nbytes]
    if ranges & set(used):
        raise PlanError(f"range {min(ranges & set(used))} is for packed weights, and others lie there")


def _check_copy(plan: Plan, copy: Copy, begins: Sequence[int] | None, stored: list[tuple[int, int]], what: str) -> None:
    if begins is None:
        if copy.packed_bytes is not None:
            raise PlanError(f"{what} is said to be packed, which the file has not")
        return
    begin, end = copy.piece.weight_offset_bytes, copy.piece.weight_offset_bytes + copy.piece.nbytes
    touching = [(low, high) for low, high in stored if low < end and begin < high]
    if touching:
        if not any(low <= begin and end <= high for low, high in touching):
            raise PlanError(f"{what} takes bytes {begin} to {end}, of which only some stay packed")
        needed = 0
    else:
        needed = _packed_bytes(begins, begin, copy.piece.nbytes)
        blocks = range(begin // _BLOCK_BYTES, (end - 1) // _BLOCK_BYTES + 1)
        if plan.slots is None or max(begins[block + 1] - begins[block] for block in blocks) > plan.slots.nbytes:
            raise PlanError(f"{what} has a block that no slot of the plan holds")
    if copy.packed_bytes != needed:
        raise PlanError(f"{what} takes {copy.packed_bytes!r} bytes over the link; its blocks have {needed}")
