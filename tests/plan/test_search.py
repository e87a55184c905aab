"""The search for the fastest plan: safe, within the budget, never slower than without times, and beside brute force."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.calibration import Calibration, Link
from penstock.plan.candidates import EVEN, Draft, Streaming
from penstock.plan.check import check_plan
from penstock.plan.menu import Menu
from penstock.plan.planner import Planner
from penstock.plan.search import Found, Judge, Search, least
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import AS_FAST
from penstock.schedule import Schedule
from tests.plan.planning import drafted_with
from tests.plan.test_floor import chain, weights_of
from tests.plan.test_planner import programs

PAGE = 4096
LINK = Link(1e9, 1e-6)


def timed(schedules: list[Schedule], draw: random.Random) -> Calibration:
    return Calibration(LINK, {one.method: tuple(draw.uniform(0, 2e-5) for _ in one.steps) for one in schedules})


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_with_any_times_a_plan_is_safe_within_its_budget_and_no_slower_than_without(
    data: st.DataObject, seed: int
) -> None:
    schedules, weights = data.draw(programs(PAGE))
    calibration = timed(schedules, random.Random(seed))
    planner = Planner(schedules, weights, page_bytes=PAGE)
    for percent in (0, 15, 40, 70):
        budget_bytes = planner.floor_bytes + (planner.full_bytes - planner.floor_bytes) * percent // 100
        plan = planner.plan(budget_bytes, calibration)
        check_plan(plan, schedules, weights, budget_bytes=budget_bytes)
        without = planner.plan(budget_bytes)
        assert planner.predicted_s(plan, calibration) <= planner.predicted_s(without, calibration) * AS_FAST


def equal_weights(count: int, pages: int) -> Menu:
    names = [f"w{index}" for index in range(count)]
    return Menu((chain(*names),), weights_of(**dict.fromkeys(names, pages * PAGE)), PAGE)


def every(menu: Menu) -> Streaming:
    """All weights may stream."""
    return Streaming.of(menu.demand, menu.demand.nbytes)


@pytest.mark.parametrize("cap", [EVEN, 1, 2, 3, 5])
@pytest.mark.parametrize("budget_pages", [10, 17, 25, 31])
def test_a_draft_keeps_to_its_cap_and_fills_the_budget_to_the_page(cap: int, budget_pages: int) -> None:
    menu = equal_weights(8, 5)
    drafted = drafted_with(every(menu), menu, budget_pages, cap, ahead_pages=2)
    if drafted is None:
        # Suffixes of so few pages leave more resident than there is room for.
        assert cap and 8 * (5 - cap) + cap + 2 > budget_pages
        return
    assert drafted.total_pages == budget_pages
    assert max(drafted.suffixes.values()) <= (cap or 5)
    if cap != EVEN:
        assert sum(suffix < cap for suffix in drafted.suffixes.values()) <= 1, "whole suffixes, and one for the rest"
    else:
        assert max(drafted.suffixes.values()) - min(drafted.suffixes.values()) <= 1, "as equal as they can be"


def test_suffixes_are_spread_over_the_schedule_and_seldom_streamed_weights_go_first() -> None:
    menu = Menu(
        (chain("a", "often", "b", "c", "d", "often", "e", "f"),),
        weights_of(a=4 * PAGE, b=4 * PAGE, c=4 * PAGE, d=4 * PAGE, e=4 * PAGE, f=4 * PAGE, often=4 * PAGE),
        PAGE,
    )
    drafted = drafted_with(every(menu), menu, 28 - 12 + 5, 4, ahead_pages=1)
    assert drafted is not None and drafted.ring_pages == 5
    assert list(drafted.suffixes) == ["a", "c", "e"] or list(drafted.suffixes) == ["b", "d", "f"]


def test_copies_alone_take_no_longer_than_the_plan() -> None:
    menu = equal_weights(8, 5)
    calibration = timed(list(menu.schedules), random.Random(1))
    tried = 0
    for cap, ahead in itertools.product(range(6), range(4)):
        drafted = drafted_with(every(menu), menu, 22, cap, ahead)
        plan = None if drafted is None else drafted.plan()
        if drafted is not None and plan is not None:
            tried += 1
            seconds = predicted_s(plan, menu.schedules, calibration)
            assert drafted.least_s(calibration, menu, 22) <= seconds * (1 + 1e-9)
    assert tried > 8


def test_of_equally_fast_plans_the_one_that_moves_least_is_taken() -> None:
    menu = equal_weights(6, 4)
    short, long = [one.plan() for ahead in (0, 2) if (one := drafted_with(every(menu), menu, 20, 4, ahead)) is not None]
    assert short is not None and long is not None
    assert short.methods[0].warm.bytes_streamed < long.methods[0].warm.bytes_streamed
    assert least([Found(1.0, long), Found(1.0001, short)]).plan is short
    assert least([Found(1.0, long), Found(1.01, short)]).plan is long


@pytest.mark.parametrize("seed", range(6))
def test_beside_all_suffixes_and_rings_there_are(seed: int) -> None:
    """Every choice of suffixes for six weights of up to three pages, each with the ring that fills the budget."""
    draw = random.Random(seed)
    names = [f"w{index}" for index in range(6)]
    sizes = {name: draw.randint(1, 3) for name in names}
    schedules = [chain(*names)]
    menu = Menu(tuple(schedules), weights_of(**{name: size * PAGE for name, size in sizes.items()}), PAGE)
    calibration = timed(schedules, draw)
    budget_pages = max(6, sum(sizes.values()) * 2 // 3)
    chosen = every(menu)
    best_s = float("inf")
    for suffixes in itertools.product(*(range(size + 1) for size in sizes.values())):
        kept = {name: suffix for name, suffix in zip(names, suffixes, strict=True) if suffix}
        ring_pages = budget_pages - chosen.resident_pages(kept)
        if not kept or ring_pages < 1:
            continue
        plan = Draft(chosen.without(frozenset(chosen.stays.keys() - kept.keys())), kept, ring_pages).plan()
        if plan is not None:
            best_s = min(best_s, predicted_s(plan, schedules, calibration))
    judge = Judge(menu, [calibration], is_measured=True, host_times={}, is_draft=False)
    found = Search(judge, budget_pages * PAGE, [], [chosen]).run()
    assert min(one.seconds for one in found) <= best_s * 1.06
