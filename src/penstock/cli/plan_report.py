"""What `penstock plan` says: placements, bytes and predicted times at one budget, or along a curve of them. No torch.

Times come from the simulator. Step times were measured, or are estimated from the bandwidth of device memory, or are
not known: then only the link's share is predicted, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from penstock.cli.empty_gpu import GpuRow
from penstock.cli.subject import Subject
from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration, Link, lower_bound_s
from penstock.plan.plan import MethodPlan, Plan, Slots
from penstock.plan.planner import lower_placements_text
from penstock.plan.simulator import in_place_by_step, simulate
from penstock.report.data import CurvePoint, WeightResidency
from penstock.schedule import Schedule, Step

StepTimes = Literal["measured", "estimated", "unknown"]


@dataclass(frozen=True)
class MethodPrediction:
    """One run of a method right after another run of it. Times are None if the link is not known."""

    method: str
    weight_bytes: int
    # The part that is gathered from in host memory, where only rows are read. No time here and no bound counts it.
    in_place_bytes: int
    # The part that is multiplied in host memory. It crosses the link like a copy; the times and the bound count it.
    multiplied_in_place_bytes: int
    bytes_streamed: int
    copies: int
    bytes_hit: int
    predicted_s: float | None
    cold_s: float | None
    stall_s: float | None
    # With every weight resident; 0 if the step times are not known.
    resident_s: float
    bound_s: float | None


@dataclass(frozen=True)
class PlanReport:
    path: Path
    device: str
    placement: str
    page_bytes: int
    weight_bytes: int
    floor_bytes: int
    full_bytes: int
    # The part of asked_bytes that is used: never more than all weights take.
    budget_bytes: int
    asked_bytes: int
    # Where the budget came from: "given", "gpu memory", "baked"; "floor" for a curve alone.
    budget_source: str
    device_bytes: int
    resident_bytes: int
    ring_bytes: int
    link_bytes_per_s: float | None
    copy_latency_s: float
    step_times: StepTimes
    gpu: GpuRow | None
    methods: tuple[MethodPrediction, ...]
    placements: tuple[WeightResidency, ...]
    curve: tuple[CurvePoint, ...]
    # The weights file that the plan is for.
    weights_file: str
    notes: tuple[str, ...]


class Predictor:
    """The plans of one program, and how long they take over one link."""

    def __init__(
        self,
        subject: Subject,
        *,
        page_bytes: int,
        placement: str,
        link: Link | None,
        step_s: Mapping[str, Sequence[float]],
        step_times: StepTimes,
        methods: Sequence[str],
    ) -> None:
        self.subject = subject
        self.link = link
        self._page_bytes = page_bytes
        self._placement = placement
        self.step_times = step_times
        self._methods = methods
        self._schedules: dict[str, Schedule] = {schedule.method: schedule for schedule in subject.schedules}
        self._step_s = {
            name: tuple(step_s.get(name, (0.0,) * len(schedule.steps))) for name, schedule in self._schedules.items()
        }
        self._timed = [name for name in self._schedules if name in step_s]
        self.planner = subject.planner(placement, page_bytes)

    @cached_property
    def _calibration(self) -> Calibration | None:
        # Like a module, plans for times only if they were measured.
        if self.link is None or self.step_times != "measured":
            return None
        return Calibration(self.link, {name: self._step_s[name] for name in self._timed})

    @property
    def top_bytes(self) -> int:
        """Pages are whole: the floor of a small program may exceed what its weights take."""
        return max(self.planner.floor_bytes, self.planner.full_bytes)

    def plan(self, budget_bytes: int) -> Plan:
        try:
            return self.planner.plan(budget_bytes, self._calibration)
        except BelowFloorError as refusal:
            # As when a module is loaded.
            can_read = self._placement == "auto" and not self.subject.begins
            others = self.planner.lower_placements() if can_read else {}
            refusal.args = (f"{refusal}{lower_placements_text(others)}",)
            raise

    def predictions(self, plan: Plan, budget_bytes: int) -> tuple[MethodPrediction, ...]:
        return tuple(
            self._prediction(method, plan.slots, budget_bytes)
            for method in plan.methods
            if method.method in self._methods
        )

    def _prediction(self, method: MethodPlan, slots: Slots | None, budget_bytes: int) -> MethodPrediction:
        schedule, step_s = self._schedules[method.method], self._step_s[method.method]
        read_bytes = sum(self.subject.weights[name].nbytes for name in schedule.weight_names)
        placed = list(zip(schedule.accesses, method.placements, strict=True))
        read_whole = {access.weight for access, _ in placed if not access.gathered}
        in_place = {one.weight: one.nbytes for _, one in placed if one.is_direct and one.weight not in read_whole}
        in_place_bytes = sum(in_place.values())
        resident_s = sum(step_s)
        timing, bound_s = None, None
        if self.link is not None:
            timing = simulate(
                method,
                schedule,
                step_s=step_s,
                direct_step_s=_link_bound_s(method, schedule, step_s, self.link),
                link=self.link,
                slots=slots,
            )
            bound_s = lower_bound_s(
                weight_bytes=sum(
                    self.subject.link_bytes(name) for name in schedule.weight_names if name not in in_place
                ),
                budget_bytes=budget_bytes,
                resident_s=resident_s,
                link_bytes_per_s=self.link.bytes_per_s,
            )
        return MethodPrediction(
            method=method.method,
            weight_bytes=read_bytes,
            in_place_bytes=in_place_bytes,
            multiplied_in_place_bytes=sum(one.in_place_bytes for access, one in placed if not access.gathered),
            bytes_streamed=method.warm.bytes_streamed,
            copies=method.warm.copies,
            bytes_hit=method.warm.bytes_hit,
            predicted_s=None if timing is None else timing.run_s,
            cold_s=None if timing is None else timing.cold_run_s,
            stall_s=None if timing is None else timing.stall_s,
            resident_s=resident_s,
            bound_s=bound_s,
        )

    def curve(self, points: int) -> tuple[CurvePoint, ...]:
        """From the floor to everything resident, in equal steps of whole pages; both ends included."""
        floor_bytes = self.planner.floor_bytes
        pages = (self.top_bytes - floor_bytes) // self._page_bytes
        budgets = {floor_bytes + pages * step // (points - 1) * self._page_bytes for step in range(points)}
        return tuple(self._curve_point(budget) for budget in sorted({*budgets, self.top_bytes}))

    def _curve_point(self, budget_bytes: int) -> CurvePoint:
        found = self.predictions(self.plan(budget_bytes), budget_bytes)
        return CurvePoint(
            budget_bytes=budget_bytes,
            predicted_s=sum(one.predicted_s or 0.0 for one in found),
            bound_s=sum(one.bound_s or 0.0 for one in found),
            streamed_bytes=sum(one.bytes_streamed for one in found),
        )


def _link_bound_s(method: MethodPlan, schedule: Schedule, step_s: Sequence[float], link: Link) -> list[float]:
    """Times of steps that read weights in place: at least what the link takes for them, which no kernel beats."""
    in_place = in_place_by_step(method, schedule)
    return [max(s, one.of_bytes / link.bytes_per_s) for s, one in zip(step_s, in_place, strict=True)]


def estimated_step_s(subject: Subject, bytes_per_s: float) -> dict[str, tuple[float, ...]]:
    """The time to read each step's weights from device memory: the least for one token.

    Gathered weights count as nothing, because only rows of them are read.
    """
    return {
        schedule.method: tuple(
            sum(subject.weights[name].nbytes for name in _read_whole(schedule, step)) / bytes_per_s
            for step in schedule.steps
        )
        for schedule in subject.schedules
    }


def _read_whole(schedule: Schedule, step: Step) -> set[str]:
    accesses = [schedule.access_by_number[number] for number in step.accesses]
    return {access.weight for access in accesses if not access.gathered}
