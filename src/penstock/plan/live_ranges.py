"""The live ranges of a method's streamed weights: how long each holds its pages. Time is in steps, cyclic over runs.

One begins with the first step during which its copy may be under way, and ends with that of its last reader. It covers
what the floor counts (see floor.py): the step before its first reader, and every earlier step at which it is the next
copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.schedule import Schedule

# Pages that follow one another in the ring: the first, and how many.
Extent = tuple[int, int]


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
    """The live ranges of one method, by first access. `always`: the weights that would never leave, which have none."""

    step_count: int
    live_ranges: tuple[LiveRange, ...]
    always: frozenset[str]


class Part(NamedTuple):
    """Pages of a stay that are copied together, counted from the first that streams."""

    first_page: int
    page_count: int
    # The step before which the copy is issued, and the step of the last reader of what was in the pages before. Both
    # count from the run of the stay's first access, and are negative in the run before.
    begin_step: int
    blocked_until: int


class LaidStay(NamedTuple):
    """A stay with its ring pages, in the order of its bytes, and the parts in which they are copied."""

    extents: tuple[Extent, ...]
    parts: tuple[Part, ...]


def live_ranges(schedule: Schedule, streamed: Collection[str]) -> MethodRanges:
    """The shortest that still overlap copies with steps, when the weights in `streamed` (none empty) stream."""
    count = len(schedule.steps)
    begins = _begin_steps(schedule, streamed)
    by_weight: dict[str, list[LiveRange]] = {}
    first_step, last_step = schedule.first_step, schedule.last_step
    for position, access in enumerate(schedule.accesses):
        name, number = access.weight, access.number
        if name in streamed:
            live = LiveRange(name, (position,), first_step[number], begins[position], last_step[number])
            by_weight.setdefault(name, []).append(live)
    live_ranges: list[LiveRange] = []
    always: set[str] = set()
    for name, alone in by_weight.items():
        joined = alone if len(alone) == 1 else _join(alone, count)
        for live in joined:
            if live.end_step - live.begin_step + 1 >= count:
                always.add(name)
        if name not in always:
            live_ranges += joined
    return MethodRanges(count, tuple(sorted(live_ranges, key=_first_position)), frozenset(always))


def issue_position(first_steps: Sequence[int], begin_step: int, step_count: int) -> int:
    """The first position fetched for this step or a later one; the number of positions is the end of the run.

    What begins with a run is issued at the end of the one before, which may be long before it. Where the step is of the
    run before, so is the position, and comes after the stay's own first access.
    """
    return bisect_left(first_steps, begin_step % step_count) if begin_step else len(first_steps)


def _first_position(live: LiveRange) -> int:
    return live.positions[0]


def _begin_steps(schedule: Schedule, streamed: Collection[str]) -> list[int]:
    """By position: the first step at which the floor counts the access's weight."""
    count = len(schedule.steps)
    first_steps = [schedule.first_step[access.number] for access in schedule.accesses]
    begins = [first - 1 for first in first_steps]
    fetched_by_step: list[list[tuple[str, int]]] = [[] for _ in range(count)]
    # As in floor.py, walking backwards: weights by their next fetch, soonest first, with its position as seen from the
    # end of the run: beyond it are those of the next.
    soonest: OrderedDict[str, tuple[int, int]] = OrderedDict()
    for position, access in enumerate(schedule.accesses):
        name = access.weight
        if name in streamed:
            fetched_by_step[first_steps[position]].append((name, position))
            if name not in soonest:
                soonest[name] = (position, count)
    for following in reversed(range(count)):
        now, then = schedule.live_weights(following - 1), schedule.live_weights(following)
        for name, (position, runs_steps) in soonest.items():
            if name not in now and name not in then:
                begin = following - 1 - runs_steps
                if begin < begins[position]:
                    begins[position] = begin
                break
        for name, position in reversed(fetched_by_step[following]):
            soonest[name] = (position, 0)
            soonest.move_to_end(name, last=False)
    return begins


def _join(alone: Sequence[LiveRange], step_count: int) -> list[LiveRange]:
    """One weight's, those that overlap or touch made one: a single copy serves them all at no cost in pages."""
    joined: list[LiveRange] = []
    for live in alone:
        if joined and live.begin_step <= joined[-1].end_step + 1:
            joined[-1] = _union(joined[-1], live)
        else:
            joined.append(live)
    # Across the end of the run; what crosses it may then reach the stay before it in turn.
    while len(joined) > 1:
        if joined[-1].begin_step <= joined[-2].end_step + 1:
            joined[-2:] = [_union(joined[-2], joined[-1])]
        elif joined[0].begin_step + step_count <= joined[-1].end_step + 1:
            begin, end = joined[0].begin_step + step_count, joined[0].end_step + step_count
            joined = [*joined[1:-1], _union(joined[-1], joined[0]._replace(begin_step=begin, end_step=end))]
        else:
            break
    return joined


def join(method: MethodRanges, kept: frozenset[int]) -> MethodRanges:
    """Arcs whose index is in `kept` made one with the next of their weight, across the end of the run too."""
    of_weight: dict[str, list[int]] = {}
    for index, live in enumerate(method.live_ranges):
        of_weight.setdefault(live.weight, []).append(index)
    live_ranges: list[LiveRange] = []
    always = set(method.always)
    for name, indices in of_weight.items():
        if kept.issuperset(indices):
            always.add(name)
            continue
        # Begin after a live range that is not joined with the next: no stay then goes round further than the list.
        start = next(turn for turn, index in enumerate(indices) if index not in kept) + 1
        joined: LiveRange | None = None
        for turn in range(start, start + len(indices)):
            later = method.step_count * (turn >= len(indices))
            index = indices[turn % len(indices)]
            live = method.live_ranges[index]
            if joined is None:
                joined, of_run = live, later
            else:
                shift = later - of_run
                shifted = live._replace(begin_step=live.begin_step + shift, end_step=live.end_step + shift)
                joined = _union(joined, shifted)
            if index not in kept:
                live_ranges.append(joined)
                joined = None
    return replace(method, live_ranges=tuple(sorted(live_ranges, key=_first_position)), always=frozenset(always))


def _union(one: LiveRange, other: LiveRange) -> LiveRange:
    return one._replace(
        positions=one.positions + other.positions,
        begin_step=min(one.begin_step, other.begin_step),
        end_step=max(one.end_step, other.end_step),
    )
