"""How long a run takes under a plan: the core's calls acted out on three clocks, without a device.

The host walks the accesses and issues copies; the copy stream makes them one after the other; the compute stream runs
the steps. All waits are those of the core, so a time differs from a measured one only as far as the times of single
copies and steps do. A step is one unit: kernels that run between two steps count as part of the second, and wait for
its copies too, so the prediction errs on the slow side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from penstock.plan.calibration import Calibration, Link
from penstock.plan.plan import Copy, MethodPlan, Plan, Slots
from penstock.plan.tuning import NOMINAL_DECODED_BYTES_PER_S
from penstock.schedule import Schedule

# How one run follows another. "ahead": the host issues the next run while the device is still at work on this one.
# "synchronised": the host first waits for the end of the compute stream.
Boundary = Literal["ahead", "synchronised"]

# Every method once.
NO_RUNS: Mapping[str, int] = MappingProxyType({})

# Between two moments, in parts of a run: sums of the same times in another order differ by less, anything real by more.
_SAME = 1e-9


@dataclass(frozen=True)
class Span:
    """One copy (lane "copy", index into MethodPlan.copies) or one step (lane "compute", index of the step) of a run."""

    lane: Literal["copy", "compute"]
    run: int
    index: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timing:
    """Times per run in the steady state, unless said otherwise."""

    run_s: float
    # The first run: nothing but the residents is in place.
    cold_run_s: float
    # The part of run_s that the compute stream spends waiting for copies.
    stall_s: float
    link_busy_s: float
    bytes_streamed: int
    # Whether the runs came to repeat themselves exactly; if not, the times are means over the later half of the runs.
    settled: bool


def simulate(
    method: MethodPlan,
    schedule: Schedule,
    *,
    step_s: Sequence[float],
    link: Link,
    direct_step_s: Sequence[float] = (),
    rest_s: float = 0.0,
    slots: Slots | None = None,
    decoded_bytes_per_s: float = NOMINAL_DECODED_BYTES_PER_S,
    steps_alone: bool = False,
    host_s_per_access: float = 0.0,
    boundary: Boundary = "ahead",
    runs: int = 32,
    spans: list[Span] | None = None,
) -> Timing:
    """Acts out runs until they repeat themselves, at most `runs` of them; the first is cold.

    `step_s` is the time from the end of one step to the end of the next with every weight in place, `rest_s` what comes
    after the last step. Copies and steps of all runs are added to `spans` if it is given.

    A step that reads a weight in place takes its time of `direct_step_s`; for a split weight, the part of that time for
    what it reads there. Copies stand still while it reads, because both use one link. A step that only gathers takes as
    long as with the weight on the device.

    Packed weights pass through the plan's `slots`: the link fills slots before the pages they are for are free, as far
    as there are slots, and goes on while others are decoded. With `steps_alone` the steps' times do not include
    decoding beside them, and a step takes that much longer.
    """
    _check(method, schedule, step_s, rest_s, host_s_per_access, runs)
    in_place = in_place_by_step(method, schedule)
    link_taken_s = [0.0] * len(step_s)
    if any(one.nbytes for one in in_place):
        if len(direct_step_s) != len(step_s):
            raise ValueError(
                f"method {method.method!r} reads weights in place, and got the times of {len(direct_step_s)} such "
                f"steps; it has {len(step_s)}"
            )
        timed = list(zip(in_place, step_s, direct_step_s, strict=True))
        link_taken_s = [one.link_s(usual_s, direct_s, link.bytes_per_s) for one, usual_s, direct_s in timed]
        step_s = [one.step_s(usual_s, direct_s) for one, usual_s, direct_s in timed]
        _check(method, schedule, step_s, rest_s, host_s_per_access, runs)
    parts = [_parts(method.method, copy, link, slots, decoded_bytes_per_s) for copy in method.copies]
    slot_count = 0 if slots is None else slots.count
    device = _Device() if steps_alone else None
    streams = _Streams(
        method, schedule, step_s, parts, slot_count, rest_s, host_s_per_access, link_taken_s, spans, device
    )
    ends: list[_RunEnd] = []
    for _ in range(runs):
        end = streams.run(boundary)
        if ends and end.repeats(ends[-1]):
            return _timing(method, streams.link_busy_s, ends[0], ends[-1], end, settled=True)
        ends.append(end)
    return _timing(method, streams.link_busy_s, ends[0], ends[runs // 2 - 1], ends[-1], settled=False)


def predicted_s(
    plan: Plan, schedules: Sequence[Schedule], calibration: Calibration, runs: Mapping[str, int] = NO_RUNS
) -> float:
    """One warm run of every calibrated method, or as many as in `runs`, back to back with others of its own."""
    steps_take_time = any(map(any, calibration.step_s.values())) or calibration.direct_step_s
    if not steps_take_time and plan.slots is None:
        # Steps that take no time hold up no copy: each copy waits for steps whose own copies came before it.
        timed = (method for method in plan.methods if method.method in calibration.step_s)
        return sum(
            runs.get(method.method, 1) * calibration.link.copy_s(copy.link_bytes)
            for method in timed
            for copy in method.copies
        )
    return sum(
        runs.get(method.method, 1)
        * simulate(
            method,
            schedule,
            step_s=calibration.step_s[method.method],
            direct_step_s=calibration.direct_step_s.get(method.method, ()),
            link=calibration.link,
            slots=plan.slots,
            decoded_bytes_per_s=decoded_per_s(calibration),
            steps_alone=calibration.steps_alone,
        ).run_s
        for method, schedule in zip(plan.methods, schedules, strict=True)
        if method.method in calibration.step_s
    )


def decoded_per_s(calibration: Calibration) -> float:
    return calibration.decoded_bytes_per_s or NOMINAL_DECODED_BYTES_PER_S


@dataclass
class InPlace:
    """What one step reads of its weights in host memory, without what it gathers."""

    nbytes: int = 0
    # All bytes of the weights that it reads there, or could.
    of_bytes: int = 0
    is_split: bool = False

    def step_s(self, usual_s: float, direct_s: float) -> float:
        if not self.nbytes:
            return usual_s
        # Both sides are read at once, and neither gets faster by it.
        return max(usual_s, self._read_s(direct_s)) if self.is_split else direct_s

    def link_s(self, usual_s: float, direct_s: float, link_bytes_per_s: float) -> float:
        """How long it keeps copies off the link. A step that waits for its reads has the link to itself, though it
        reads slower than copies would: measured, both at once were no faster than one after the other."""
        if not self.nbytes:
            return 0.0
        read_s = self._read_s(direct_s)
        return read_s if read_s > usual_s else self.nbytes / link_bytes_per_s

    def _read_s(self, direct_s: float) -> float:
        return direct_s * self.nbytes / self.of_bytes


def in_place_by_step(method: MethodPlan, schedule: Schedule) -> list[InPlace]:
    found = [InPlace() for _ in schedule.steps]
    for access, placement in zip(schedule.accesses, method.placements, strict=True):
        if not access.gathered and (access.linear or placement.in_place_bytes):
            one = found[schedule.first_step[access.number]]
            one.nbytes += placement.in_place_bytes
            one.of_bytes += placement.nbytes
            one.is_split |= placement.is_split
    return found


class _Part(NamedTuple):
    """A part of a copy: what crosses the link at once, what is decoded at once, or both one after the other, through a
    slot."""

    link_s: float
    decoding_s: float


def _parts(method: str, copy: Copy, link: Link, slots: Slots | None, decoded_bytes_per_s: float) -> tuple[_Part, ...]:
    """The equal parts that the core makes of a copy. What stays packed in device memory does not use the link."""
    if not copy.decoded_bytes:
        return (_Part(link.copy_s(copy.link_bytes), 0.0),)
    decoding_s = copy.decoded_bytes / decoded_bytes_per_s
    if not copy.link_bytes:
        return (_Part(0.0, decoding_s),)
    if slots is None:
        raise ValueError(f"method {method!r} copies {copy.piece.weight!r} packed, and there are no slots")
    count = -(-copy.link_bytes // slots.nbytes)
    return (_Part(link.copy_s(-(-copy.link_bytes // count)), decoding_s / count),) * count


def _timing(
    method: MethodPlan,
    link_busy_s: float,
    cold: _RunEnd,
    earlier: _RunEnd,
    end: _RunEnd,
    *,
    settled: bool,
) -> Timing:
    count = end.run - earlier.run
    # While one clock is still losing its lead on the others, the slowest one gives the time.
    moved_s = max(
        end.end_s - earlier.end_s,
        end.copied_s - earlier.copied_s,
        end.link_s - earlier.link_s,
        end.host_s - earlier.host_s,
    )
    return Timing(
        run_s=moved_s / count,
        cold_run_s=cold.end_s,
        stall_s=(end.stalled_s - earlier.stalled_s) / count,
        link_busy_s=link_busy_s,
        bytes_streamed=method.warm.bytes_streamed,
        settled=settled,
    )


@dataclass(frozen=True)
class _RunEnd:
    """What one run leaves to the next. Moments count from the beginning of the first run."""

    run: int
    end_s: float
    copied_s: float
    # For packed weights: when the link is free, and when each slot is, starting with the one that is filled next.
    link_s: float
    slots_freed_s: tuple[float, ...]
    stalled_s: float
    host_s: float
    step_ends_s: tuple[float, ...]
    stays_ready_s: tuple[float, ...]

    def repeats(self, last: _RunEnd) -> bool:
        """Whether the next run will be like this one, only later."""
        shift_s = self.end_s - last.end_s
        tolerance_s = _SAME * shift_s

        def same(now_s: float, then_s: float) -> bool:
            return abs(now_s - then_s - shift_s) <= tolerance_s

        # A host that gets further ahead did not affect what came out the same, and will not later.
        host_gains = self.host_s - last.host_s < shift_s
        return (
            (host_gains or same(self.host_s, last.host_s))
            and all(map(same, self.slots_freed_s, last.slots_freed_s))
            and all(map(same, self.stays_ready_s, last.stays_ready_s))
            and all(map(same, self.step_ends_s, last.step_ends_s))
        )


class _Issue(NamedTuple):
    """One copy, as the loop over all of them reads it."""

    copy: int
    position: int
    # If it takes only one of the two: time on the link, or time to decode what lies in device memory.
    link_s: float
    decoding_s: float
    # If it passes through slots.
    parts: tuple[_Part, ...]
    wait_step: int
    stay: int


class _Device:
    """Steps and decoding share the device: where they overlap, decoding goes on and the step gets that much longer."""

    def __init__(self) -> None:
        # Spans of decoding and of steps, as far as something still to come may overlap with them.
        self._decoding: deque[tuple[float, float]] = deque()
        self._steps: deque[tuple[float, float]] = deque()
        # Time by which steps should have been longer, found out after they ended. The next step takes it.
        self._owed_s = 0.0

    def step_ends_s(self, begin_s: float, took_s: float) -> float:
        end_s = begin_s + took_s + self._owed_s
        self._owed_s = 0.0
        for from_s, until_s in _from(self._decoding, begin_s):
            if from_s >= end_s:
                break
            end_s += until_s - max(from_s, begin_s)
        self._steps.append((begin_s, end_s))
        return end_s

    def decode(self, begin_s: float, took_s: float) -> None:
        end_s = begin_s + took_s
        for from_s, until_s in _from(self._steps, begin_s):
            if from_s >= end_s:
                break
            self._owed_s += min(until_s, end_s) - max(from_s, begin_s)
        self._decoding.append((begin_s, end_s))


def _from(spans: deque[tuple[float, float]], begin_s: float) -> deque[tuple[float, float]]:
    """Drops spans that are over by `begin_s`, and returns the rest: what comes later begins no earlier."""
    while spans and spans[0][1] <= begin_s:
        spans.popleft()
    return spans


class _Streams:
    """The clocks. Moment 0 stands for everything before the first run."""

    def __init__(
        self,
        method: MethodPlan,
        schedule: Schedule,
        step_s: Sequence[float],
        parts: Sequence[tuple[_Part, ...]],
        slot_count: int,
        rest_s: float,
        host_s_per_access: float,
        link_taken_s: Sequence[float],
        spans: list[Span] | None,
        device: _Device | None,
    ) -> None:
        self.device = device
        self.step_s = tuple(step_s)
        self.link_taken_s = tuple(link_taken_s)
        self.rest_s = rest_s
        self.host_s_per_access = host_s_per_access
        self.spans = spans
        self.runs = 0
        # Copies and decoding follow each other on one stream; what fills slots is on another. The link takes one copy
        # at a time, from either.
        self.host_s = self.compute_s = self.copied_s = self.link_s = self.stalled_s = 0.0
        self.slots_freed_s = [0.0] * slot_count
        self.next_slot = 0
        # Overwritten as steps end and copies are issued, so every entry is from this run or the last. The one extra
        # step is for copies that wait for none.
        self.step_ends_s = [0.0] * (len(step_s) + 1)
        self.stays_ready_s = [0.0] * len(method.stays)

        issues = [self._issue(index, copy, parts[index]) for index, copy in enumerate(method.copies)]
        self.link_busy_s = math.fsum(part.link_s for of_copy in parts for part in of_copy)
        # At the first position, whatever their own: they are issued when the run begins.
        self.prologue = [issues[index]._replace(position=0) for index in method.prologue]
        self.access_count = len(schedule.accesses)
        # By step, and for copies once more for the end of the run: the copies issued before its launch, the stays
        # fetched for it, and the accesses fetched by then (0 if there are none for it: it follows the step before).
        self.issued: list[list[_Issue]] = [[] for _ in range(len(step_s) + 1)]
        self.reads: list[list[int]] = [[] for _ in step_s]
        self.fetched = [0] * len(step_s)
        following = 0
        for position, (access, placement) in enumerate(zip(schedule.accesses, method.placements, strict=True)):
            step = schedule.first_step[access.number]
            while following < len(issues) and issues[following].position <= position:
                self.issued[step].append(issues[following]._replace(position=position))
                following += 1
            if placement.stay is not None:
                self.reads[step].append(placement.stay)
            self.fetched[step] = position + 1
        self.issued[-1] = issues[following:]

    def _issue(self, index: int, copy: Copy, parts: tuple[_Part, ...]) -> _Issue:
        wait_step = len(self.step_s) if copy.wait_step is None else copy.wait_step
        if copy.link_bytes and copy.decoded_bytes:
            return _Issue(index, copy.issue_before, 0.0, 0.0, parts, wait_step, copy.stay)
        return _Issue(index, copy.issue_before, *parts[0], (), wait_step, copy.stay)

    def run(self, boundary: Boundary) -> _RunEnd:
        if self.runs == 0:
            self._copy(self.prologue)
        compute_s = self.compute_s
        for step, took_s in enumerate(self.step_s):
            self._copy(self.issued[step])
            launched_s = self.host_s + self.host_s_per_access * self.fetched[step]
            could_s = max(compute_s, launched_s)
            begin_s = could_s
            for stay in self.reads[step]:
                if self.stays_ready_s[stay] > begin_s:
                    begin_s = self.stays_ready_s[stay]
            self.stalled_s += begin_s - could_s
            compute_s = begin_s + took_s if self.device is None else self.device.step_ends_s(begin_s, took_s)
            if self.link_taken_s[step]:
                self.copied_s = max(self.copied_s, begin_s) + self.link_taken_s[step]
                self.link_s = max(self.link_s, begin_s) + self.link_taken_s[step]
            self.step_ends_s[step] = compute_s
            if self.spans is not None:
                self.spans.append(Span("compute", self.runs, step, begin_s, compute_s))
        self._copy(self.issued[-1])
        self.compute_s = compute_s + self.rest_s
        self.host_s += self.host_s_per_access * self.access_count
        if boundary == "synchronised":
            self.host_s = max(self.host_s, self.compute_s)
        self.runs += 1
        return _RunEnd(
            run=self.runs,
            end_s=self.compute_s,
            copied_s=self.copied_s,
            link_s=self.link_s,
            slots_freed_s=(*self.slots_freed_s[self.next_slot :], *self.slots_freed_s[: self.next_slot]),
            stalled_s=self.stalled_s,
            host_s=self.host_s,
            step_ends_s=tuple(self.step_ends_s[:-1]),
            stays_ready_s=tuple(self.stays_ready_s),
        )

    def _copy(self, issues: Sequence[_Issue]) -> None:
        """A copy begins after the copies before it, the host's issue, and the readers of what its pages held (S1)."""
        copied_s = self.copied_s
        for index, position, link_s, decoding_s, parts, wait_step, stay in issues:
            issued_s = self.host_s + self.host_s_per_access * position
            begin_s = max(copied_s, issued_s, self.step_ends_s[wait_step])
            if parts:
                copied_s = self._pass_through_slots(parts, issued_s, begin_s)
            elif link_s:
                begin_s = max(begin_s, self.link_s)
                copied_s = self.link_s = begin_s + link_s
            else:
                copied_s = self._decoded_s(begin_s, decoding_s)
            self.stays_ready_s[stay] = copied_s
            if self.spans is not None:
                self.spans.append(Span("copy", self.runs, index, begin_s, copied_s))
        self.copied_s = copied_s

    def _pass_through_slots(self, parts: Sequence[_Part], issued_s: float, could_s: float) -> float:
        """A slot is filled as soon as it is free, and decoded when the pages are."""
        for link_s, decoding_s in parts:
            filled_s = max(self.link_s, issued_s, self.slots_freed_s[self.next_slot]) + link_s
            could_s = self._decoded_s(max(could_s, filled_s), decoding_s)
            self.link_s = filled_s
            self.slots_freed_s[self.next_slot] = could_s
            self.next_slot = (self.next_slot + 1) % len(self.slots_freed_s)
        return could_s

    def _decoded_s(self, begin_s: float, took_s: float) -> float:
        if self.device is not None:
            self.device.decode(begin_s, took_s)
        return begin_s + took_s


def _check(
    method: MethodPlan,
    schedule: Schedule,
    step_s: Sequence[float],
    rest_s: float,
    host_s_per_access: float,
    runs: int,
) -> None:
    where = f"method {method.method!r}"
    numbers = [placement.number for placement in method.placements]
    if method.method != schedule.method or numbers != [access.number for access in schedule.accesses]:
        raise ValueError(f"{where}: the plan is not of this schedule, which is of method {schedule.method!r}")
    if not len(step_s) == method.step_count == len(schedule.steps):
        raise ValueError(
            f"{where}: got the times of {len(step_s)} steps; the plan has {method.step_count} and the schedule "
            f"{len(schedule.steps)}"
        )
    copied = {copy.stay for copy in method.copies}
    for placement in method.placements:
        if placement.stay is not None and placement.stay not in copied:
            raise ValueError(f"{where}: access {placement.number} ({placement.weight!r}) reads a stay without a copy")
    for name, value in (*((f"step_s[{k}]", s) for k, s in enumerate(step_s)), ("rest_s", rest_s)):
        _check_time(where, name, value)
    _check_time(where, "host_s_per_access", host_s_per_access)
    if runs < 2:
        raise ValueError(f"{where}: {runs} runs to simulate; the first is cold, so there must be at least 2")


def _check_time(where: str, name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{where}: {name} is {value}; a time is finite and not negative")
