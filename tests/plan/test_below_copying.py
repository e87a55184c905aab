"""What "auto" does with budgets that copying does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration, Link
from penstock.plan.check import check_plan
from penstock.plan.menu import Menu
from penstock.plan.nominal import nominal
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import WORTHWHILE_TIMES
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.test_floor import chain

PAGE = 1000


def linears(*rows: int, linear: bool = True) -> tuple[Schedule, dict[str, Weight]]:
    """A chain of products with weights of 100 bytes a row."""
    weights = {f"w{n}": Weight(f"w{n}", "bfloat16", (count, 50), (0, 1)) for n, count in enumerate(rows)}
    schedule = chain(*weights)
    return replace(schedule, accesses=tuple(replace(one, linear=linear) for one in schedule.accesses)), weights


def planner(schedule: Schedule, weights: dict[str, Weight], placement: str = "auto", **options: bool) -> Planner:
    return Planner([schedule], weights, page_bytes=PAGE, placement=placement, **options)


def timed(schedule: Schedule, in_place_s: float) -> Calibration:
    steps = len(schedule.steps)
    return Calibration(Link(1e6), {schedule.method: (1e-4,) * steps}, {schedule.method: (in_place_s,) * steps})


def nominal_s(plan: Plan, schedule: Schedule, weights: dict[str, Weight], page_bytes: int = PAGE) -> float:
    """On all machines that stand for those nobody measured."""
    machines = nominal(Menu((schedule,), weights, page_bytes, split=lambda access: access.linear))
    return sum(predicted_s(plan, [schedule], machine) for machine in machines)


def test_auto_splits_below_the_floor_of_copying() -> None:
    schedule, weights = linears(*[160] * 12)
    auto, copying = planner(schedule, weights), planner(schedule, weights, "stream")
    assert auto.copying_bytes == copying.floor_bytes > 0
    assert auto.floor_bytes == planner(schedule, weights, "split").floor_bytes < copying.floor_bytes
    limit_s = WORTHWHILE_TIMES * nominal_s(copying.plan(copying.floor_bytes), schedule, weights)
    for budget in range(auto.floor_bytes, copying.floor_bytes, PAGE):
        plan = auto.plan(budget)
        check_plan(plan, [schedule], weights, budget_bytes=budget)
        assert plan.split_weights or plan.direct_weights
        assert nominal_s(plan, schedule, weights) <= limit_s
    # Less does not fit, however long it might take.
    with pytest.raises(BelowFloorError, match=r"bytes for \d+ resident weights?") as refusal:
        auto.plan(auto.floor_bytes - 1)
    assert refusal.value.floor_bytes == auto.floor_bytes


@pytest.mark.parametrize(
    ("rows", "page_bytes"),
    [([160] * 12, PAGE), ([14_336] * 8, 100_000), ([4096, 1024, 1024, 4096, 14_336, 14_336, 12_288] * 3, 50_000)],
)
def test_more_memory_is_no_slower_where_copying_begins_to_fit(rows: list[int], page_bytes: int) -> None:
    """Right above its floor copying may be slower than splitting: its ring takes memory that prefixes could have."""
    schedule, weights = linears(*rows)
    auto, copying, split = (
        Planner([schedule], weights, page_bytes=page_bytes, placement=name) for name in ("auto", "stream", "split")
    )
    at = auto.copying_bytes
    budgets = [at - 2 * page_bytes, at - page_bytes, at, at + page_bytes, (at + auto.full_bytes) // 2]
    taken = [nominal_s(auto.plan(budget), schedule, weights, page_bytes) for budget in budgets]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(taken))
    for budget, seconds in zip(budgets[2:], taken[2:], strict=True):
        both = [nominal_s(one.plan(budget), schedule, weights, page_bytes) for one in (copying, split)]
        assert seconds == min(both)


def test_splits_are_planned_by_steps_that_were_timed_with_copies_alone() -> None:
    """What no kernel of ours reads streams beside them: so copies and reads over the link are simulated together."""
    schedule, weights = linears(*[160] * 12)
    accesses = tuple(replace(one, linear=index % 3 != 0) for index, one in enumerate(schedule.accesses))
    schedule = replace(schedule, accesses=accesses)
    known = Calibration(Link(1e6), {schedule.method: (1e-4,) * len(schedule.steps)})
    for placement in ("auto", "split"):
        found = planner(schedule, weights, placement)
        for budget in range(found.floor_for(known), found.full_bytes, 16 * PAGE):
            plan = found.plan(budget, known)
            check_plan(plan, [schedule], weights, budget_bytes=budget)
            # Reads over the link are no faster than copies.
            crossed = plan.methods[0].warm.bytes_streamed + plan.methods[0].warm.bytes_in_place
            assert found.predicted_s(plan, known) >= crossed / known.link.bytes_per_s


def test_floor_and_the_plan_that_meets_it_agree() -> None:
    schedule, weights = linears(*[160] * 12)
    auto = planner(schedule, weights)
    found = auto.floor()
    assert found.floor_bytes == auto.floor_bytes and found.plan == auto.plan(auto.floor_bytes)
    check_plan(found.plan, [schedule], weights, budget_bytes=found.floor_bytes)


@pytest.mark.parametrize(("reads", "of", "is_ever_worth_it"), [(2, 6, True), (3, 8, False)])
def test_a_slow_answer_is_none(reads: int, of: int, is_ever_worth_it: bool) -> None:
    """Some weights are read several times in a row: they are copied once, and would cross the link as often."""
    page, (_, weights) = 1_000_000, linears(*[160_000] * 8)
    schedule = chain(*(name for number, name in enumerate(weights) for _ in range(reads if number < of else 1)))
    schedule = replace(schedule, accesses=tuple(replace(one, linear=True) for one in schedule.accesses))
    auto, copying, split = (
        Planner([schedule], weights, page_bytes=page, placement=name) for name in ("auto", "stream", "split")
    )
    limit_s = WORTHWHILE_TIMES * nominal_s(copying.plan(copying.floor_bytes), schedule, weights)
    assert split.floor_bytes < auto.floor_bytes <= copying.floor_bytes
    for budget in range(split.floor_bytes, copying.floor_bytes, page):
        assert (nominal_s(split.plan(budget), schedule, weights) <= limit_s) == (budget >= auto.floor_bytes)
    assert (auto.floor_bytes < copying.floor_bytes) == is_ever_worth_it
    by_time = f"takes too long beside copying, for which the floor is {copying.floor_bytes}"
    for budget in (auto.floor_bytes - 1, split.floor_bytes - 1):
        with pytest.raises(BelowFloorError) as refusal:
            auto.plan(budget)
        assert refusal.value.floor_bytes == auto.floor_bytes
        assert (by_time in str(refusal.value)) == is_ever_worth_it


def test_without_our_kernel_or_without_times_nothing_is_read_over_the_link() -> None:
    schedule, weights = linears(*[160] * 12)
    copying = planner(schedule, weights, "stream").floor_bytes
    assert planner(schedule, weights, can_split=False).floor_bytes == copying
    plain, _ = linears(*[160] * 12, linear=False)
    assert planner(plain, weights).floor_bytes == copying
    assert planner(schedule, weights, "stream").floor_for(timed(schedule, 1e-4)) == copying


@pytest.mark.parametrize(("in_place_s", "is_worth_it"), [(0.016, True), (0.1, False)])
def test_other_kernels_read_in_place_where_that_was_timed(in_place_s: float, is_worth_it: bool) -> None:
    schedule, weights = linears(*[160] * 12, linear=False)
    auto, times = planner(schedule, weights), timed(schedule, in_place_s)
    copying = auto.copying_bytes
    assert auto.floor_bytes == copying
    assert (auto.floor_for(times) < copying) == is_worth_it
    if not is_worth_it:
        with pytest.raises(BelowFloorError):
            auto.plan(copying - PAGE, times)
        return
    limit_s = WORTHWHILE_TIMES * predicted_s(auto.plan(copying), [schedule], times)
    for budget in range(auto.floor_for(times), copying, PAGE):
        plan = auto.plan(budget, times)
        check_plan(plan, [schedule], weights, budget_bytes=budget)
        assert plan.direct_weights and predicted_s(plan, [schedule], times) <= limit_s
