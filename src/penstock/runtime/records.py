"""A plan as the flat numbers that the core reads. csrc/plan/plan_records.cpp reads them in the same order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.plan.plan import MethodPlan, Piece, Plan
from penstock.record import VERSION
from penstock.schedule import Schedule
from penstock.weights.packing import Blocks

Numbers = ctypes.Array[ctypes.c_int64]


def plan_numbers(plan: Plan, weights: Iterable[str]) -> Numbers:
    """`weights`: all of the session's, in its order. A plan names a weight by number, and bytes by offsets in it."""
    return _array([VERSION, *_plan(plan, _numbers_of(weights))])


def _plan(plan: Plan, weights: Mapping[str, int]) -> Iterator[int]:
    yield len(plan.blocks)
    yield from (block.nbytes for block in plan.blocks)
    yield len(plan.ranges)
    for area in plan.ranges:
        yield len(area.blocks)
        yield from area.blocks
    yield from _pieces(plan.fills, weights)
    yield from _slots(plan)
    yield len(plan.stores)
    for store in plan.stores:
        yield from _piece(store.piece, weights)
        yield store.packed_bytes
    yield len(plan.banks)
    for bank in plan.banks:
        yield from (bank.experts, bank.slots, bank.range_index, bank.range_offset_bytes, len(bank.members))
        for member in bank.members:
            yield from (weights[member.weight], member.range_index, member.range_offset_bytes)
    yield len(plan.methods)
    for method in plan.methods:
        yield from _method(method, weights)


def _slots(plan: Plan) -> Iterator[int]:
    if plan.slots is None:
        yield 0
    else:
        yield from (plan.slots.count, plan.slots.range_index, plan.slots.nbytes)


def _pieces(pieces: Sequence[Piece], weights: Mapping[str, int]) -> Iterator[int]:
    yield len(pieces)
    for piece in pieces:
        yield from _piece(piece, weights)


def _piece(piece: Piece, weights: Mapping[str, int]) -> Iterator[int]:
    yield weights[piece.weight]
    yield piece.weight_offset_bytes
    yield piece.nbytes
    yield piece.range_index
    yield piece.range_offset_bytes


def _method(method: MethodPlan, weights: Mapping[str, int]) -> Iterator[int]:
    yield method.step_count
    yield len(method.placements)
    yield len(method.stays)
    for placement in method.placements:
        yield placement.number
        yield weights[placement.weight]
        yield placement.nbytes
        yield placement.range_index
        yield placement.range_offset_bytes
        yield -1 if placement.stay is None else placement.stay
        yield -1 if placement.prefix_bytes is None else placement.prefix_bytes
        yield -1 if placement.bank is None else placement.bank
        yield int(placement.chooses)
    for stay in method.stays:
        yield stay.nbytes
        yield stay.last_step
    yield len(method.copies)
    for copy in method.copies:
        yield copy.stay
        yield copy.issue_before
        yield -1 if copy.wait_step is None else copy.wait_step
        yield from _piece(copy.piece, weights)
    yield len(method.prologue)
    yield from method.prologue


def packed_numbers(weights: Iterable[tuple[int, int, Blocks]]) -> Numbers:
    """`weights`: the packed ones, in the order of their numbers; each is its number, offset in the file, and blocks."""
    rows = list(weights)
    numbers = [VERSION, len(rows)]
    for number, offset_bytes, blocks in rows:
        data_offset_bytes = blocks.data_offset_bytes - offset_bytes
        numbers += [number, blocks.raw_bytes, blocks.kind, data_offset_bytes, *blocks.begins_bytes]
    return _array(numbers)


def lru_numbers(
    schedules: Sequence[Schedule], weights: Iterable[str], *, budget_bytes: int, granularity_bytes: int
) -> Numbers:
    """`weights`: all of the session's, in its order."""
    index = _numbers_of(weights)
    pinned = {access.weight for schedule in schedules for access in schedule.accesses if access.pinned}
    numbers = [VERSION, budget_bytes, granularity_bytes, len(index)]
    for name, number in index.items():
        numbers += [number, int(name in pinned)]
    numbers.append(len(schedules))
    for schedule in schedules:
        numbers += [len(schedule.steps), len(schedule.accesses)]
        for access in schedule.accesses:
            numbers += [access.number, index[access.weight], schedule.last_step[access.number]]
    return _array(numbers)


def _numbers_of(weights: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(weights)}


def _array(numbers: list[int]) -> Numbers:
    return (ctypes.c_int64 * len(numbers))(*numbers)
