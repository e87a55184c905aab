"""Where steps waited for copies, from traces made by hand and from a plan of two stays."""

from __future__ import annotations

import json

import pytest

from penstock.errors import PenstockError
from penstock.plan.plan import Copy, MethodPlan, Piece, Placement, Plan, Stay
from penstock.report.stalls import TraceEvent, find_stalls, read_events, traced_runs
from penstock.schedule import Access, Schedule, Step
from tests.report.cases import MIB, RUN_NS, RUNS, a_report, a_trace

# Two steps; the second reads two weights, and the first weight comes once more, as a stay of its own.
SCHEDULE = Schedule(
    "forward",
    (Access(0, "a"), Access(1, "b"), Access(2, "a")),
    (Step("first", (0,)), Step("second", (1, 2))),
)
PLAN = Plan(
    page_bytes=1,
    blocks=(),
    ranges=(),
    fills=(),
    methods=(
        MethodPlan(
            "forward",
            placements=tuple(Placement(k, name, 10, 0, 0, k) for k, name in enumerate("aba")),
            stays=tuple(Stay(name, 10, (k,), min(k, 1)) for k, name in enumerate("aba")),
            copies=tuple(Copy(k, Piece(name, 0, 10, 0, 0), 0, None) for k, name in enumerate("aba")),
            step_count=2,
        ),
    ),
)


def step(index: int, begin_ns: int, end_ns: int, run: int = 1) -> TraceEvent:
    return TraceEvent("compute", run, "forward", index, SCHEDULE.steps[index].kernel, 0, begin_ns, end_ns)


def copy(index: int, begin_ns: int, end_ns: int, run: int = 1) -> TraceEvent:
    return TraceEvent("copy", run, "forward", index, "aba"[index], 10, begin_ns, end_ns)


def found(events: list[TraceEvent], plan: Plan | None = PLAN) -> list[tuple[int, int, int, int, str]]:
    stalls = find_stalls(events, {"forward": SCHEDULE}, plan)
    return [(stall.run, stall.step, stall.begin_ns, stall.stall_ns, stall.weight) for stall in stalls]


def test_a_step_stalls_from_the_end_of_the_one_before_to_the_end_of_its_last_copy() -> None:
    events = [copy(0, 0, 40), step(0, 45, 100), copy(1, 40, 130), copy(2, 130, 170), step(1, 180, 200)]
    assert found(events) == [(1, 0, 0, 40, "a"), (1, 1, 100, 70, "a")]
    (_, second) = find_stalls(events, {"forward": SCHEDULE}, PLAN)
    assert (second.kernel, second.copy_bytes, second.copy_ns) == ("second", 10, 40)


def test_a_copy_in_time_is_no_stall() -> None:
    events = [copy(0, 0, 40), step(0, 45, 100), copy(1, 40, 70), copy(2, 70, 100), step(1, 180, 200)]
    assert found(events) == [(1, 0, 0, 40, "a")]


def test_a_copy_of_another_stay_of_the_same_weight_is_not_waited_for() -> None:
    # Copy 0 is of `a` too, for the first step of the next run; it ends before the second step begins.
    events = [step(0, 0, 100), copy(1, 0, 50), copy(2, 50, 90), copy(0, 90, 150), step(1, 180, 200)]
    assert found(events) == []
    # Without a plan a copy is known by its weight alone.
    assert found(events, plan=None) == [(1, 1, 100, 50, "a")]


def test_the_first_step_of_a_run_waits_from_the_end_of_the_run_before() -> None:
    events = [step(0, 0, 10), step(1, 10, 20), copy(0, 15, 35), step(0, 50, 60, run=2), step(1, 60, 70, run=2)]
    assert found(events) == [(2, 0, 20, 15, "a")]


def test_a_later_copy_is_not_taken_for_an_earlier_one() -> None:
    """Of the copies of several runs, the one that the step can have waited for."""
    events = [copy(0, 0, 5), step(0, 10, 20), step(1, 20, 30), copy(0, 25, 45, run=1), step(0, 60, 70, run=2)]
    assert found(events) == [(1, 0, 0, 5, "a"), (2, 0, 30, 15, "a")]


def test_runs_are_summed_up() -> None:
    events = [copy(0, 0, 40), step(0, 45, 100), copy(1, 40, 130), step(1, 180, 200), copy(0, 190, 240, run=2)]
    (run,) = traced_runs(events, find_stalls(events, {"forward": SCHEDULE}, PLAN))
    # The second run has no step that ended: it failed.
    assert (run.run, run.method, run.begin_ns, run.end_ns) == (1, "forward", 45, 200)
    assert (run.steps, run.copies, run.bytes_copied, run.copy_ns, run.stall_ns) == (2, 2, 20, 130, 70)


def test_the_file_of_a_trace_is_read_to_the_nanosecond() -> None:
    events = read_events(a_trace(), "t.json")
    assert len(events) == RUNS * 5
    last = next(event for event in events if event.lane == "copy" and event.index == 1)
    assert (last.begin_ns, last.end_ns, last.nbytes) == (RUN_NS + 1_200_125, RUN_NS + 6_500_500, 6 * MIB + 7)
    assert {event.run for event in read_events(json.loads(a_report().trace_json), "t.json")} == {1, 2, 3}


@pytest.mark.parametrize("document", [{}, {"traceEvents": {}}, {"traceEvents": [{"ph": "X"}]}, {"traceEvents": [3]}])
def test_another_file_is_refused_by_its_name(document: dict[str, object]) -> None:
    with pytest.raises(PenstockError, match=r"^t\.json is not a trace of Module\.trace"):
        read_events(document, "t.json")
