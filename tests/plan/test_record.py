"""Plans beside the recorded ones: no floor is higher, none with measured times is slower; without times some are slower
on one machine and faster on others, and all together are faster. What the rows came to: docs/architecture.md."""

from __future__ import annotations

import statistics

import pytest

from penstock.errors import BelowFloorError
from penstock.plan.check import check_plan
from tests.plan.record import recorder
from tests.plan.record.recorder import BUDGETS, MACHINES, PAGES, Row
from tests.plan.record.schedules import PROGRAMS

# Of seconds: rounding to pages in another order may cost that much at one point.
SLACK = 1.005
# Without times. A longer ring means more bytes and fewer waits: what is better depends on the machine, so that no plan
# is the best on all. The record's planner stood at another place of that choice.
SLACK_WITHOUT_TIMES = 1.11
BYTES_SLACK_WITHOUT_TIMES = 1.15


def _compare(name: str, pages: str, budgets: tuple[int, ...], machines: tuple[str, ...]) -> list[float]:
    """Times of plans made without any, as parts of the recorded."""
    recorded = recorder.read()
    ratios = []
    for row in recorder.rows(name, pages, budgets, machines, recorded):
        before = recorded[name, pages, row.budget]
        at = (name, pages, row.budget)
        assert row.floor_bytes <= before.floor_bytes, at
        assert row.full_bytes == before.full_bytes, at
        assert row.bytes_streamed <= BYTES_SLACK_WITHOUT_TIMES * before.bytes_streamed, at
        for machine in MACHINES:
            ratios.append(row.usual_s[machine] / before.usual_s[machine])
            assert ratios[-1] <= SLACK_WITHOUT_TIMES, (*at, machine)
        for machine in machines:
            assert row.calibrated_s[machine] <= SLACK * before.calibrated_s[machine], (*at, machine)
    return ratios


def test_the_record_is_whole() -> None:
    recorded = recorder.read()
    assert len(PROGRAMS) >= 12 and len(BUDGETS) == 12
    assert set(recorded) == {(name, pages, budget) for name in PROGRAMS for pages in PAGES for budget in BUDGETS}
    for row in recorded.values():
        assert set(row.usual_s) == set(row.calibrated_s) == set(row.calibrated_bytes) == set(MACHINES)
        assert 0 <= row.floor_bytes <= row.budget_bytes <= row.full_bytes
        assert row.bytes_streamed == 0 or row.budget < 100
    # Where something streams at all: most of it would show nothing otherwise.
    assert sum(row.bytes_streamed > 0 for row in recorded.values()) > len(recorded) * 3 // 4


def test_without_times_plans_are_faster_on_the_whole() -> None:
    ratios = [ratio for name in PROGRAMS for ratio in _compare(name, "cuda", (0, 10, 50, 90), ())]
    assert statistics.geometric_mean(ratios) < 0.997


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_worse_with_times(name: str) -> None:
    _compare(name, "cuda", (10, 80), ("25-1", "55-4"))
    _compare(name, "soft", (5, 50), ("12-4",))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_byte_below_the_floor_is_refused_and_the_floor_is_proved(name: str) -> None:
    program = PROGRAMS[name]()
    planner = recorder.planner(program, "cuda")
    plan = planner.plan(planner.floor_bytes)
    check_plan(plan, program.schedules, program.weights, budget_bytes=planner.floor_bytes)
    if planner.floor_bytes:
        with pytest.raises(BelowFloorError):
            planner.plan(planner.floor_bytes - 1)


def test_a_worse_plan_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with a record that was a little better everywhere fails."""
    name = "shared_layers"
    real = recorder.read()[name, "cuda", 50]
    better = Row(**{**vars(real), "bytes_streamed": int(real.bytes_streamed / 1.2)})
    monkeypatch.setattr(recorder, "read", lambda: {(name, "cuda", 50): better})
    with pytest.raises(AssertionError):
        _compare(name, "cuda", (50,), ())
