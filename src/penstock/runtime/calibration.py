"""Turns spans of traced runs into what the planner needs: the speed of the link and the time of each step by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from penstock.errors import PenstockError
from penstock.plan.calibration import Calibration, Link, fit_link
from penstock.plan.plan import Copy, Plan
from penstock.runtime.session import TraceSpan
from penstock.schedule import Schedule

_NS = 1e-9


def calibration_of(spans: Sequence[TraceSpan], schedules: Sequence[Schedule], plan: Plan) -> Calibration:
    """Takes medians over the runs of each method that ran. Refuses if nothing ran or nothing was copied.

    Copy spans of packed weights time their decoding; their transfers over the link have spans of their own.
    """
    traced = [span for span in spans if span.lane == "copy"]
    over_link = [span for span in spans if span.lane == "link"]
    over_link += [span for span in traced if _copy(plan, span).packed_bytes is None]
    if not over_link:
        raise PenstockError(
            "nothing was copied in the runs to calibrate by: either no method ran, or no weight is copied at "
            "this budget and there is nothing to plan: set a smaller one"
        )
    decoded = [span for span in traced if not _copy(plan, span).link_bytes]
    samples = [(span.nbytes, span.end_ns - span.begin_ns) for span in over_link]
    return Calibration(
        _link(samples), step_times(spans, schedules, plan), decoded_bytes_per_s=_decoded_bytes_per_s(decoded)
    )


def _copy(plan: Plan, span: TraceSpan) -> Copy:
    return plan.methods[span.method_index].copies[span.index]


def _decoded_bytes_per_s(spans: Sequence[TraceSpan]) -> float | None:
    """Of weights that stay packed. A span may include a wait for readers of its pages, so the faster half decides."""
    rates = sorted(span.nbytes / (span.end_ns - span.begin_ns) / _NS for span in spans if span.end_ns > span.begin_ns)
    return rates[len(rates) * 3 // 4] if rates else None


def step_times(spans: Sequence[TraceSpan], schedules: Sequence[Schedule], plan: Plan) -> dict[str, tuple[float, ...]]:
    """For each method that ran: how long each step takes once its weights are there."""
    copies = [span for span in spans if span.lane == "copy"]
    runs: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.lane == "compute":
            runs[span.run].append(span)
    ready_ns = _last_copies(copies)
    by_method: dict[int, list[list[float]]] = defaultdict(list)
    for steps in runs.values():
        ordered = sorted(steps, key=lambda span: span.index)
        method_index = ordered[0].method_index
        if len(ordered) == len(schedules[method_index].steps):
            by_method[method_index].append(_step_times(ordered, schedules[method_index], plan, ready_ns))
    if not by_method:
        raise PenstockError("no run was completed to calibrate by")
    return {
        schedules[index].method: tuple(median(times) for times in zip(*measured, strict=True))
        for index, measured in by_method.items()
    }


def check_calibration(calibration: Calibration | str | None, schedules: Sequence[Schedule]) -> Calibration | None:
    """The calibration for the first plan; None with "first-runs", when nothing is measured yet.

    Refuses a calibration measured on another program: it would plan for steps that do not exist.
    """
    if not isinstance(calibration, Calibration):
        return None
    steps = {schedule.method: len(schedule.steps) for schedule in schedules}
    for method, times in (*calibration.step_s.items(), *calibration.direct_step_s.items()):
        if len(times) != steps.get(method):
            raise PenstockError(
                f"the calibration has {len(times)} steps for method {method!r}; the program has "
                f"{steps.get(method, 'no such method')}"
            )
    if not calibration.step_s:
        raise PenstockError("the calibration has no method")
    check_direct_times(calibration, schedules)
    return calibration


def check_direct_times(calibration: Calibration, schedules: Sequence[Schedule]) -> None:
    """Refuses if a method was not timed: it would be replanned all the same, and might take many times as long."""
    if not calibration.direct_step_s:
        return
    for times, how in ((calibration.step_s, "calibrate()"), (calibration.direct_step_s, "calibrate(in_place=True)")):
        missing = [schedule.method for schedule in schedules if schedule.method not in times]
        if missing:
            raise PenstockError(
                f"reads in place change the plan of every method, and {how} did not time {', '.join(missing)}: run "
                "every method inside both calibrate() and calibrate(in_place=True)"
            )


def _last_copies(copies: Sequence[TraceSpan]) -> dict[tuple[int, int], list[int]]:
    """By method and copy: the times at which it ended, in rising order."""
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for span in copies:
        ends[span.method_index, span.index].append(span.end_ns)
    return ends


def _step_times(
    steps: Sequence[TraceSpan], schedule: Schedule, plan: Plan, ready_ns: dict[tuple[int, int], list[int]]
) -> list[float]:
    """A step lasts from the end of the one before, or from the end of the last copy it waited for."""
    method_index = steps[0].method_index
    method = plan.methods[method_index]
    copies_of_stay: dict[int, list[int]] = defaultdict(list)
    for index, copy in enumerate(method.copies):
        copies_of_stay[copy.stay].append(index)
    position_of = {access.number: position for position, access in enumerate(schedule.accesses)}
    times: list[float] = []
    before_ns = steps[0].begin_ns
    for span, step in zip(steps, schedule.steps, strict=True):
        begin_ns = before_ns
        for number in step.accesses:
            stay = method.placements[position_of[number]].stay
            for index in copies_of_stay[stay] if stay is not None else ():
                # Several runs made this copy: take the last one that had ended when the step did.
                arrived = [end for end in ready_ns.get((method_index, index), ()) if end <= span.end_ns]
                begin_ns = max([begin_ns, *arrived[-1:]])
        times.append(max(0, span.end_ns - begin_ns) * _NS)
        before_ns = span.end_ns
    return times


def _link(copies: Sequence[tuple[int, int]]) -> Link:
    """`copies` are pairs of bytes and nanoseconds."""
    samples = [(nbytes, ns * _NS) for nbytes, ns in copies if ns > 0]
    if not samples:
        raise PenstockError("the copies in the runs to calibrate by were too short to be timed")
    try:
        return fit_link(samples)
    except ValueError:
        # With one size, or sizes too similar to separate a copy's fixed cost from its cost per byte, use the mean.
        return Link(sum(nbytes for nbytes, _ in samples) / sum(seconds for _, seconds in samples))
