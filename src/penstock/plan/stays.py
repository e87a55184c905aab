"""Which stays a method's streamed weights make, and how long each holds its pages. Time is in steps, cyclic over runs.

An arc is one stay before it has pages: from the first step during which its copy may be under way to the step of its
last reader. At the least it covers what the floor counts (see floor.py): the step before its first reader, and every
earlier step at which it is the next copy. Lookahead makes arcs begin earlier.
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
class Arc(NamedTuple):
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
class MethodArcs:
    """The arcs of one method, by first access. `always` names the weights that would never leave: they are no arcs."""

    step_count: int
    arcs: tuple[Arc, ...]
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


def method_arcs(schedule: Schedule, streamed: Collection[str]) -> MethodArcs:
    """The shortest arcs that still overlap copies with steps, when the weights in `streamed` (none empty) stream."""
    count = len(schedule.steps)
    begins = _begin_steps(schedule, streamed)
    by_weight: dict[str, list[Arc]] = {}
    first_step, last_step = schedule.first_step, schedule.last_step
    for position, access in enumerate(schedule.accesses):
        name, number = access.weight, access.number
        if name in streamed:
            arc = Arc(name, (position,), first_step[number], begins[position], last_step[number])
            by_weight.setdefault(name, []).append(arc)
    arcs: list[Arc] = []
    always: set[str] = set()
    for name, alone in by_weight.items():
        joined = alone if len(alone) == 1 else _join(alone, count)
        for arc in joined:
            if arc.end_step - arc.begin_step + 1 >= count:
                always.add(name)
        if name not in always:
            arcs += joined
    return MethodArcs(count, tuple(sorted(arcs, key=_first_position)), frozenset(always))


def issue_position(first_steps: Sequence[int], begin_step: int, step_count: int) -> int:
    """The first position fetched for this step or a later one; the number of positions is the end of the run.

    What begins with a run is issued at the end of the one before, which may be long before it. Where the step is of the
    run before, so is the position, and comes after the stay's own first access.
    """
    return bisect_left(first_steps, begin_step % step_count) if begin_step else len(first_steps)


def _first_position(arc: Arc) -> int:
    return arc.positions[0]


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


def _join(alone: Sequence[Arc], step_count: int) -> list[Arc]:
    """One weight's arcs, those that overlap or touch made one: a single copy serves them all at no cost in pages."""
    joined: list[Arc] = []
    for arc in alone:
        if joined and arc.begin_step <= joined[-1].end_step + 1:
            joined[-1] = _union(joined[-1], arc)
        else:
            joined.append(arc)
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


def join(method: MethodArcs, kept: frozenset[int]) -> MethodArcs:
    """Arcs whose index is in `kept` made one with the next of their weight, across the end of the run too."""
    of_weight: dict[str, list[int]] = {}
    for index, arc in enumerate(method.arcs):
        of_weight.setdefault(arc.weight, []).append(index)
    arcs: list[Arc] = []
    always = set(method.always)
    for name, indices in of_weight.items():
        if kept.issuperset(indices):
            always.add(name)
            continue
        # Begin after an arc that is not joined with the next: no stay then goes round further than the list.
        start = next(turn for turn, index in enumerate(indices) if index not in kept) + 1
        joined: Arc | None = None
        for turn in range(start, start + len(indices)):
            later = method.step_count * (turn >= len(indices))
            index = indices[turn % len(indices)]
            arc = method.arcs[index]
            if joined is None:
                joined, of_run = arc, later
            else:
                shift = later - of_run
                shifted = arc._replace(begin_step=arc.begin_step + shift, end_step=arc.end_step + shift)
                joined = _union(joined, shifted)
            if index not in kept:
                arcs.append(joined)
                joined = None
    return replace(method, arcs=tuple(sorted(arcs, key=_first_position)), always=frozenset(always))


def _union(one: Arc, other: Arc) -> Arc:
    return one._replace(
        positions=one.positions + other.positions,
        begin_step=min(one.begin_step, other.begin_step),
        end_step=max(one.end_step, other.end_step),
    )
