"""The floor: the smallest budget at which a schedule is safe and still overlaps. Exact, in bytes; no torch.

Launches are asynchronous: while step i runs, the host has already fetched what step i+1 reads, and one copy more is on
its way. So the device must hold, at the worst step, the weights of two neighbouring steps (a weight once) and the next
copy after them, beside what stays resident. Runs follow one another, so the step after the last is the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Window:
    """What must be in place around one step of one method."""

    transient_bytes: int
    schedule: Schedule
    step_index: int
    pair: frozenset[str]
    next_copy: str | None


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
    packed_bytes = sum(_round_up(weights[name].nbytes, RESIDENT_ALIGNMENT_BYTES) for name in held)
    resident_bytes = _round_up(packed_bytes, granularity_bytes)

    # Weights without bytes are left out here, once: they are neither held nor ever "the next copy".
    streamed_bytes = {
        name: _round_up(weights[name].nbytes, granularity_bytes)
        for schedule in schedules
        for name in schedule.weight_names
        if name not in held and name not in direct and weights[name].nbytes > 0
    }
    worst = max(
        (window for schedule in schedules for window in _windows(schedule, streamed_bytes)),
        key=lambda window: window.transient_bytes,
        default=None,
    )
    if worst is None or worst.transient_bytes == 0:
        return Floor(resident_bytes, resident_bytes, 0, None, None, (), None)
    return Floor(
        floor_bytes=resident_bytes + worst.transient_bytes,
        resident_bytes=resident_bytes,
        transient_bytes=worst.transient_bytes,
        method=worst.schedule.method,
        step_index=worst.step_index,
        pair=tuple(name for name in worst.schedule.weight_names if name in worst.pair),
        next_copy=worst.next_copy,
    )


def check_schedules(schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, granularity_bytes: int) -> None:
    """Raises ScheduleError for schedules that break their own rules, ValueError for a granularity that is none."""
    if granularity_bytes < 1:
        raise ValueError(f"granularity_bytes is {granularity_bytes}; it must be 1 or more")
    for schedule in schedules:
        _check(schedule, weights)


def _windows(schedule: Schedule, streamed_bytes: Mapping[str, int]) -> list[_Window]:
    """One window per step, in step order."""
    if not schedule.steps:
        return []
    fetched_by_step: list[list[str]] = [[] for _ in schedule.steps]
    for access in schedule.accesses:
        if access.weight in streamed_bytes:
            fetched_by_step[schedule.first_step[access.number]].append(access.weight)
    live = [
        frozenset(name for name in schedule.live_weights(index) if name in streamed_bytes)
        for index in range(len(schedule.steps))
    ]

    # Weights by their next fetch, soonest first. Walking backwards in time, the weight of each access passed becomes
    # the soonest, so a lookup costs no more than the pair it must skip: linear, however often weights repeat.
    soonest: OrderedDict[str, None] = OrderedDict()

    def pass_backwards(index: int) -> None:
        for name in reversed(fetched_by_step[index]):
            soonest[name] = None
            soonest.move_to_end(name, last=False)

    # The cycle after the one looked at: what comes "next" near its end is fetched there.
    for following in reversed(range(len(schedule.steps))):
        pass_backwards(following)

    windows: list[_Window] = []
    for following in reversed(range(len(schedule.steps))):
        # Here `soonest` holds what is fetched after the accesses of step `following`, and before they come again.
        index = (following - 1) % len(schedule.steps)
        pair = live[index] | live[following]
        next_copy = next((name for name in soonest if name not in pair), None)
        pair_bytes = sum(streamed_bytes[name] for name in pair)
        next_bytes = 0 if next_copy is None else streamed_bytes[next_copy]
        windows.append(_Window(pair_bytes + next_bytes, schedule, index, pair, next_copy))
        pass_backwards(following)
    # The pair (last, first) came last and belongs last: sort into step order, so that of equals the earliest is named.
    return sorted(windows, key=lambda window: window.step_index)


def _check(schedule: Schedule, weights: Mapping[str, Weight]) -> None:
    """The floor of a schedule that breaks its own rules would be a wrong number: refuse it instead."""
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


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
