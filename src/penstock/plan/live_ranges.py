"""The live ranges of a method's streamed weights: how long each holds its pages. Time is in steps, cyclic over runs.

A live range begins with the first step during which its copy may be under way, and ends with its last reader's step. It
covers what the floor counts (see floor.py): the step before its first reader, and every earlier step at which it is the
next copy. Between two live ranges of a weight is a gap. If the weight is kept through it, the two are one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from penstock.plan.floor import windows
from penstock.schedule import Schedule


# Planning makes these by the ten thousand, and a tuple is made several times as fast as a frozen dataclass.
class LiveRange(NamedTuple):
    """One stay in time. `positions` are those of its accesses, in the order in which they come.

    Steps count from the run in which the first of the accesses is made: `begin_step` may be negative (the copy is
    issued in the run before), `end_step` may exceed the run (the last reader is in the run after).
    """

    weight: str
    positions: tuple[int, ...]
    first_step: int
    begin_step: int
    end_step: int


@dataclass(frozen=True)
class MethodRanges:
    """The live ranges of one method, by first access. `always`: weights that would never leave, which have none."""

    step_count: int
    live_ranges: tuple[LiveRange, ...]
    always: frozenset[str] = frozenset()


class Gap(NamedTuple):
    """The gap from a live range (its index) to the next of its weight, in steps of the run in which it begins."""

    live: int
    begin_step: int
    # Zero or less where the two overlap or touch.
    step_count: int


def live_ranges(schedule: Schedule, streamed: Collection[str]) -> MethodRanges:
    """The shortest ranges that still overlap copies with steps, when the weights in `streamed` (none empty) stream."""
    count = len(schedule.steps)
    first_step, last_step = schedule.first_step, schedule.last_step
    begins = [first_step[access.number] - 1 for access in schedule.accesses]
    for index, (_, copy) in enumerate(windows(schedule, streamed)):
        if copy is not None:
            step = index - count * (copy.is_in_next_run + (index == count - 1))
            begins[copy.position] = min(begins[copy.position], step)
    alone = tuple(
        LiveRange(access.weight, (position,), first_step[access.number], begins[position], last_step[access.number])
        for position, access in enumerate(schedule.accesses)
        if access.weight in streamed
    )
    method = MethodRanges(count, alone)
    # Ranges that overlap or touch become one: a single copy serves them all at no cost in pages.
    return join(method, frozenset(gap.live for gap in gaps(method) if gap.step_count <= 0))


def gaps(method: MethodRanges) -> list[Gap]:
    found: list[Gap] = []
    for indices in _by_weight(method):
        end = -method.step_count
        for turn, index in enumerate(indices):
            end = max(end, method.live_ranges[index].end_step)
            is_last = turn == len(indices) - 1
            following = method.live_ranges[indices[0 if is_last else turn + 1]]
            next_begin = following.begin_step + method.step_count * is_last
            found.append(Gap(index, end + 1, next_begin - end - 1))
    return found


def join(method: MethodRanges, kept: frozenset[int]) -> MethodRanges:
    """Joins live ranges whose index is in `kept` with the next of their weight, across the end of the run too."""
    live_ranges: list[LiveRange] = []
    always = set(method.always)
    for indices in _by_weight(method):
        if kept.issuperset(indices):
            always.add(method.live_ranges[indices[0]].weight)
            continue
        # Begin after a live range that is not joined with the next, so that no stay goes round further than the list.
        start = next(turn for turn, index in enumerate(indices) if index not in kept) + 1
        joined: LiveRange | None = None
        for index in [*indices[start:], *indices[:start]]:
            live = method.live_ranges[index]
            if joined is not None:
                later = method.step_count * (live.positions[0] <= joined.positions[0])
                joined = joined._replace(
                    positions=joined.positions + live.positions, end_step=max(joined.end_step, live.end_step + later)
                )
            else:
                joined = live
            if index not in kept:
                live_ranges.append(joined)
                joined = None
    live_ranges.sort(key=lambda live: live.positions[0])
    return MethodRanges(method.step_count, tuple(live_ranges), frozenset(always))


def _by_weight(method: MethodRanges) -> list[list[int]]:
    """Indices of live ranges, grouped by weight, in their order."""
    found: dict[str, list[int]] = {}
    for index, live in enumerate(method.live_ranges):
        found.setdefault(live.weight, []).append(index)
    return list(found.values())
