"""Makes what a report says from a module, a trace of its runs and what was measured around it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from penstock.errors import PenstockError
from penstock.plan.calibration import Calibration, lower_bound_s
from penstock.plan.simulator import in_place_by_step, predicted_s
from penstock.report.data import (
    CurvePoint,
    ExpertSlots,
    MeasuredPoint,
    ReportData,
    Summary,
    WeightResidency,
)
from penstock.report.places import places
from penstock.report.stalls import TraceEvent, find_stalls, read_events, traced_runs
from penstock.runtime.calibration import calibration_of
from penstock.runtime.module import Module
from penstock.runtime.session import TraceSpan

CURVE_POINTS = 25


def collect(
    module: Module,
    trace: str | os.PathLike[str],
    measured: Sequence[MeasuredPoint],
    *,
    method: str,
    title: str | None = None,
    curve_points: int = CURVE_POINTS,
) -> ReportData:
    """`trace` is a file that `module.trace` wrote under the module's present plan.

    `measured` holds runs of `method` that were not traced, one point per budget, including the module's own budget.
    """
    text = Path(trace).read_text()
    events = read_events(_parsed(text, trace), str(trace))
    schedules = {each.name: each.schedule for each in module.program.methods}
    traced = {event.method for event in events if event.lane == "compute"}
    if method not in traced:
        raise PenstockError(f"{trace} has no run of method {method!r}; it has {', '.join(sorted(traced)) or 'none'}")
    here = next((point for point in measured if point.budget_bytes == module.budget_bytes), None)
    if here is None:
        budgets = ", ".join(str(point.budget_bytes) for point in measured) or "none"
        raise PenstockError(
            f"nothing was measured in the module's budget of {module.budget_bytes} bytes, only {budgets}"
        )
    stalls = find_stalls(events, schedules, module.plan)
    weights = _weights(module, method)
    calibration = _calibration(module, events)
    yardstick = _yardstick(module, method, weights, measured, calibration)
    return ReportData(
        title=title or f"{module.path.name} in a budget",
        made_at=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        summary=_summary(module, method, here, yardstick),
        weights=weights,
        experts=tuple(
            ExpertSlots(use.weights, use.experts, use.slots, use.hits, use.misses, use.hit_rate)
            for use in module.expert_uses()
        ),
        runs=tuple(traced_runs(events, stalls)),
        stalls=tuple(sorted(stalls, key=lambda stall: (-stall.stall_ns, stall.begin_ns))),
        measured=tuple(sorted(measured, key=lambda point: point.budget_bytes)),
        curve=() if calibration is None else _curve(module, method, calibration, yardstick, curve_points),
        trace_json=text,
    )


@dataclass(frozen=True)
class _Yardstick:
    """The basis of every bound in a report, so that no bound is above a time that was seen or predicted."""

    # Bytes of the weights that the method reads and that may have to be copied.
    weight_bytes: int
    resident_s: float
    # The fastest rate of copies that was seen; None if there were none.
    link_bytes_per_s: float | None

    def bound_s(self, budget_bytes: int) -> float:
        if self.link_bytes_per_s is None:
            return self.resident_s
        return lower_bound_s(
            weight_bytes=self.weight_bytes,
            budget_bytes=budget_bytes,
            resident_s=self.resident_s,
            link_bytes_per_s=self.link_bytes_per_s,
        )


def _yardstick(
    module: Module,
    method: str,
    weights: Sequence[WeightResidency],
    measured: Sequence[MeasuredPoint],
    calibration: Calibration | None,
) -> _Yardstick:
    read = set(module.program.method(method).schedule.weight_names)
    rates = [sample.bytes_per_s for sample in module.link if sample.ns]
    resident_s = [point.run_s for point in measured if point.bytes_streamed == 0]
    if calibration is not None:
        rates.append(calibration.link.bytes_per_s)
        resident_s.append(calibration.resident_s(method))
    never_copied = ("in place", "split", "slots")
    return _Yardstick(
        weight_bytes=sum(
            weight.nbytes for weight in weights if weight.name in read and weight.kind not in never_copied
        ),
        resident_s=min(resident_s, default=0.0),
        link_bytes_per_s=max(rates, default=None),
    )


def _summary(module: Module, method: str, here: MeasuredPoint, yardstick: _Yardstick) -> Summary:
    bound_s = yardstick.bound_s(module.budget_bytes)
    bytes_per_s = here.bytes_streamed / here.run_s
    link = yardstick.link_bytes_per_s
    return Summary(
        program=module.path.name,
        device=str(module.device),
        torch=module.program.built_with.get("torch", "unknown"),
        method=method,
        weight_bytes=module.weight_bytes,
        state_bytes=module.state_bytes,
        floor_bytes=module.floor_bytes,
        budget_bytes=module.budget_bytes,
        peak_bytes=here.peak_bytes,
        resident_bytes=None if module.plan is None else module.plan.resident_bytes,
        ring_bytes=None if module.plan is None else module.plan.ring_bytes,
        run_s=here.run_s,
        bytes_streamed=here.bytes_streamed,
        bytes_per_s=bytes_per_s,
        copies=here.copies,
        stall_ns=here.stall_ns,
        link_bytes_per_s=link,
        link_part=None if link is None else bytes_per_s / link,
        bound_s=bound_s,
        bound_part=bound_s / here.run_s,
        identical=here.identical,
    )


def _weights(module: Module, method: str) -> tuple[WeightResidency, ...]:
    """In the order of first access."""
    if module.plan is None:
        return tuple(WeightResidency.of(weight, "on demand") for weight in module.program.weights)
    return places(module.plan, module.program.weights, [method])


def _calibration(module: Module, events: Sequence[TraceEvent]) -> Calibration | None:
    """The times of the trace, for predictions. None without a plan, or without copies."""
    if module.plan is None or not any(event.lane == "copy" for event in events):
        return None
    numbers = {name: number for number, name in enumerate(module.methods)}
    spans = [
        TraceSpan(each.lane, each.run, numbers[each.method], each.index, each.nbytes, each.begin_ns, each.end_ns)
        for each in events
    ]
    return calibration_of(spans, [each.schedule for each in module.program.methods], module.plan)


def _curve(
    module: Module, method: str, calibration: Calibration, yardstick: _Yardstick, count: int
) -> tuple[CurvePoint, ...]:
    """From the floor to the budget in which everything is resident. Empty if reads in place were not timed."""
    # A trace of copies does not time reads in place. A module that plans with them has their times.
    known = module.calibration
    timed = replace(
        calibration,
        step_s={method: calibration.step_s[method]},
        direct_step_s={} if known is None else known.direct_step_s,
    )
    floor_bytes, full_bytes = module.floor_bytes, module.full_bytes
    schedules = [each.schedule for each in module.program.methods]
    points: list[CurvePoint] = []
    for k in range(count):
        budget_bytes = floor_bytes + (full_bytes - floor_bytes) * k // max(1, count - 1)
        # What the module itself would plan, by its own mode and calibration. Nothing is installed.
        plan = module.plan_at(budget_bytes)
        assert plan is not None, "a calibration was made, so there are plans"
        planned = plan.method(method)
        schedule = module.program.method(method).schedule
        if method not in timed.direct_step_s and any(step.nbytes for step in in_place_by_step(planned, schedule)):
            return ()
        run_s, streamed_bytes = predicted_s(plan, schedules, timed), planned.warm.bytes_streamed
        points.append(CurvePoint(budget_bytes, run_s, yardstick.bound_s(budget_bytes), streamed_bytes))
    return tuple(points)


def _parsed(text: str, path: str | os.PathLike[str]) -> dict[str, object]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PenstockError(f"{path} is not a trace: {error}") from error
    if not isinstance(document, dict):
        raise PenstockError(f"{path} is not a trace: it holds a {type(document).__name__}")
    return document
