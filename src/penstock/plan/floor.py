"""The floor: the smallest budget at which a schedule is safe and still overlaps. Exact, in bytes; no torch.

Launches are asynchronous: while step i runs, the host has already fetched what step i+1 reads, and one copy more is on
its way. So the device must hold, at the worst step, the weights of two neighbouring steps (a weight once) and the next
copy after them, beside what stays resident. Runs follow one another, so the step after the last is the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule import Schedule
from penstock.weight import Weight

# Resident weights share pages. Each starts on this boundary, which is what device allocators give and kernels expect.
RESIDENT_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Floor:
    """The floor and what sets it. `method` and `step_index` are None when nothing streams."""

    floor_bytes: int
    resident_bytes: int
    transient_bytes: int
    method: str | None
    step_index: int | None
    # Streamed weights of step `step_index` and the one after it, in the order of first access.
    pair: tuple[str, ...]
    # The weight whose copy is in flight beside them.
    next_copy: str | None


class NextCopy(NamedTuple):
    """The copy in flight beside two steps: of the access at this position, in this run or in the next."""

    weight: str
    position: int
    is_in_next_run: bool


class Window(NamedTuple):
    """What must be in place around one step."""

    pair: frozenset[str]
    next_copy: NextCopy | None


def windows(schedule: Schedule, streamed: Collection[str]) -> list[Window]:
    """By step: what it and the step after it read of the weights in `streamed`, and the next copy after these."""
    steps = range(len(schedule.steps))
    fetched: list[list[NextCopy]] = [[] for _ in steps]
    # Weights by their next fetch, soonest first. Walking backwards in time, the weight of each access passed becomes
    # the soonest, so a lookup costs no more than the pair it must skip: linear, however often weights repeat.
    soonest: OrderedDict[str, NextCopy] = OrderedDict()
    for position, access in enumerate(schedule.accesses):
        if access.weight in streamed:
            fetched[schedule.first_step[access.number]].append(NextCopy(access.weight, position, False))
            soonest.setdefault(access.weight, NextCopy(access.weight, position, True))
    live = [frozenset(name for name in schedule.live_weights(index) if name in streamed) for index in steps]
    found: list[Window] = []
    for following in reversed(steps):
        # Here `soonest` holds what is fetched after the accesses of step `following`, and before they come again.
        pair = live[following - 1] | live[following]
        found.append(Window(pair, next((copy for name, copy in soonest.items() if name not in pair), None)))
        for copy in reversed(fetched[following]):
            soonest[copy.weight] = copy
            soonest.move_to_end(copy.weight, last=False)
    # Into step order: `found` goes from the last step but one back to the first, and ends with the last.
    return [*found[-2::-1], *found[-1:]]


def floor_bytes(
    schedules: Sequence[Schedule],
    weights: Mapping[str, Weight],
    *,
    resident: frozenset[str] = frozenset(),
    direct: frozenset[str] = frozenset(),
    granularity_bytes: int = 1,
) -> Floor:
    """The floor of a program with these methods.

    `resident` weights stay on the device for all methods (those of pinned accesses do so unasked); `direct` ones are
    read from host memory and need no device bytes. All others are streamed, each in pages of `granularity_bytes`.
    Methods take turns with the same transient bytes, so the largest demand of any of them counts.
    """
    check_schedules(schedules, weights, granularity_bytes=granularity_bytes)
    pinned = frozenset(access.weight for schedule in schedules for access in schedule.accesses if access.pinned)
    _check_placements(weights, resident, direct, pinned)

    held = resident | pinned
    packed_bytes = sum(round_up(weights[name].nbytes, RESIDENT_ALIGNMENT_BYTES) for name in held)
    resident_bytes = round_up(packed_bytes, granularity_bytes)
    # Weights without bytes are left out here, once: they are neither held nor ever "the next copy".
    streamed_bytes = {
        name: round_up(weights[name].nbytes, granularity_bytes)
        for schedule in schedules
        for name in schedule.weight_names
        if name not in held and name not in direct and weights[name].nbytes > 0
    }
    worst: tuple[int, Schedule | None, int, Window] = 0, None, 0, Window(frozenset(), None)
    for schedule in schedules:
        for index, window in enumerate(windows(schedule, streamed_bytes)):
            needed_bytes = sum(map(streamed_bytes.__getitem__, window.pair))
            if window.next_copy is not None:
                needed_bytes += streamed_bytes[window.next_copy.weight]
            if needed_bytes > worst[0]:
                worst = needed_bytes, schedule, index, window
    transient_bytes, of, step_index, (pair, copy) = worst
    if of is None:
        return Floor(resident_bytes, resident_bytes, 0, None, None, (), None)
    return Floor(
        floor_bytes=resident_bytes + transient_bytes,
        resident_bytes=resident_bytes,
        transient_bytes=transient_bytes,
        method=of.method,
        step_index=step_index,
        pair=tuple(name for name in of.weight_names if name in pair),
        next_copy=None if copy is None else copy.weight,
    )


def check_schedules(schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, granularity_bytes: int) -> None:
    """Raises ScheduleError for schedules that break their own rules: their floor would be a wrong number.

    ValueError for a granularity below 1.
    """
    if granularity_bytes < 1:
        raise ValueError(f"granularity_bytes is {granularity_bytes}; it must be 1 or more")
    for schedule in schedules:
        _check(schedule, weights)


def _check(schedule: Schedule, weights: Mapping[str, Weight]) -> None:
    where = f"schedule of method {schedule.method!r}"
    if len(schedule.access_by_number) != len(schedule.accesses):
        raise ScheduleError(f"{where}: {len(schedule.accesses)} accesses, but the numbers are not unique")
    previous_step = 0
    for access in schedule.accesses:
        if access.weight not in weights:
            raise ScheduleError(f"{where}: access {access.number} fetches {access.weight!r}, which is not a weight")
        if access.number not in schedule.first_step:
            raise ScheduleError(f"{where}: access {access.number} ({access.weight!r}) is read by no step")
        step = schedule.first_step[access.number]
        if step < previous_step:
            raise ScheduleError(
                f"{where}: access {access.number} ({access.weight!r}) is first read by step {step}, but is called "
                f"after an access first read by step {previous_step}; calls must be in the order of their first readers"
            )
        previous_step = step
    for number in schedule.first_step:
        if number not in schedule.access_by_number:
            index = schedule.first_step[number]
            raise ScheduleError(f"{where}: step {index} reads access {number}, which is never called")


def _check_placements(
    weights: Mapping[str, Weight], resident: frozenset[str], direct: frozenset[str], pinned: frozenset[str]
) -> None:
    unknown = sorted((resident | direct) - weights.keys())
    if unknown:
        raise ValueError(f"placed as resident or direct, but not a weight: {', '.join(map(repr, unknown))}")
    both = sorted(direct & (resident | pinned))
    if both:
        raise ValueError(f"placed as direct, but resident or pinned as well: {', '.join(map(repr, both))}")


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
