"""A plan as the flat numbers that the core reads. csrc/plan/plan_records.cpp reads them in the same order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.plan.plan import MethodPlan, Piece, Plan
from penstock.schedule import Schedule
from penstock.weight import Weight
from penstock.weights.packing import Blocks

Numbers = ctypes.Array[ctypes.c_int64]


def plan_numbers(plan: Plan, source_offsets: Mapping[str, int]) -> Numbers:
    """`source_offsets`: where each weight begins in the weights file."""
    return _array(list(_plan(plan, source_offsets)))


def _plan(plan: Plan, offsets: Mapping[str, int]) -> Iterator[int]:
    yield len(plan.blocks)
    yield from (block.nbytes for block in plan.blocks)
    yield len(plan.ranges)
    for area in plan.ranges:
        yield len(area.blocks)
        yield from area.blocks
    yield from _pieces(plan.fills, offsets)
    yield from _slots(plan)
    yield len(plan.stores)
    for store in plan.stores:
        yield from _piece(store.piece, offsets)
        yield store.packed_bytes
    yield len(plan.methods)
    for method in plan.methods:
        yield from _method(method, offsets)


def _slots(plan: Plan) -> Iterator[int]:
    if plan.slots is None:
        yield 0
    else:
        yield from (plan.slots.count, plan.slots.range_index, plan.slots.nbytes)


def _pieces(pieces: Sequence[Piece], offsets: Mapping[str, int]) -> Iterator[int]:
    yield len(pieces)
    for piece in pieces:
        yield from _piece(piece, offsets)


def _piece(piece: Piece, offsets: Mapping[str, int]) -> Iterator[int]:
    yield offsets[piece.weight] + piece.weight_offset_bytes
    yield piece.nbytes
    yield piece.range_index
    yield piece.range_offset_bytes


def _method(method: MethodPlan, offsets: Mapping[str, int]) -> Iterator[int]:
    yield method.step_count
    yield len(method.placements)
    yield len(method.stays)
    for placement in method.placements:
        yield placement.number
        yield placement.nbytes
        yield placement.range_index
        # A direct access has no range to be offset in: here stands where it lies in the file.
        yield offsets[placement.weight] if placement.is_direct else placement.range_offset_bytes
        yield -1 if placement.stay is None else placement.stay
        yield -1 if placement.prefix_bytes is None else placement.prefix_bytes
        yield offsets[placement.weight]
    for stay in method.stays:
        yield stay.nbytes
        yield stay.last_step
    yield len(method.copies)
    for copy in method.copies:
        yield copy.stay
        yield copy.issue_before
        yield -1 if copy.wait_step is None else copy.wait_step
        yield from _piece(copy.piece, offsets)
    yield len(method.prologue)
    yield from method.prologue


def packed_numbers(weights: Iterable[tuple[int, Blocks]]) -> Numbers:
    """Packed weights, each with the offset by which plans know it: behind the end of the file, in their order."""
    numbers: list[int] = []
    for offset_bytes, blocks in weights:
        numbers += [offset_bytes, blocks.raw_bytes, blocks.kind, blocks.data_offset_bytes, *blocks.begins_bytes]
    return _array(numbers)


def lru_numbers(
    schedules: Sequence[Schedule],
    weights: Mapping[str, Weight],
    source_offsets: Mapping[str, int],
    *,
    budget_bytes: int,
    granularity_bytes: int,
) -> Numbers:
    names = list(weights)
    index = {name: i for i, name in enumerate(names)}
    pinned = {access.weight for schedule in schedules for access in schedule.accesses if access.pinned}
    numbers = [budget_bytes, granularity_bytes, len(names)]
    for name in names:
        numbers += [source_offsets[name], weights[name].nbytes, int(name in pinned)]
    numbers.append(len(schedules))
    for schedule in schedules:
        numbers += [len(schedule.steps), len(schedule.accesses)]
        for access in schedule.accesses:
            numbers += [access.number, index[access.weight], schedule.last_step[access.number]]
    return _array(numbers)


def _array(numbers: list[int]) -> Numbers:
    return (ctypes.c_int64 * len(numbers))(*numbers)
