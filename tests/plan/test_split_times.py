"""A decoder whose products can be split, by the simulator: the best of all ways against each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.plan.check import check_plan
from penstock.plan.planner import Planner
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.test_floor import llama_3_8b
from tests.plan.test_placements import DIRECT_BYTES_PER_S, LARGE_PAGE, planner, seconds_by_placement, times


@pytest.fixture(scope="module")
def llama() -> tuple[Schedule, dict[str, Weight]]:
    """Every product is a launch of its own."""
    schedule, weights = llama_3_8b(fused_norms=False)
    accesses = tuple(
        replace(
            access,
            gathered=access.weight == "embedding",
            linear=len(weights[access.weight].shape) == 2 and access.weight != "embedding",
        )
        for access in schedule.accesses
    )
    return replace(schedule, accesses=accesses), weights


def test_near_the_floor_of_streaming_auto_beats_every_pure_placement(llama: tuple[Schedule, dict[str, Weight]]) -> None:
    schedule, weights = llama
    calibration = times(schedule, weights, DIRECT_BYTES_PER_S)
    floor = planner([schedule], weights, "stream", LARGE_PAGE).floor_bytes
    seconds = seconds_by_placement(schedule, weights, calibration, floor)
    for placement in ("stream", "in-place", "split"):
        assert seconds["auto"] < 0.95 * seconds[placement], placement


def test_at_no_budget_is_auto_slower_than_a_pure_placement(llama: tuple[Schedule, dict[str, Weight]]) -> None:
    schedule, weights = llama
    calibration = times(schedule, weights, DIRECT_BYTES_PER_S)
    for budget in (8_000_000_000, 14_000_000_000):
        seconds = seconds_by_placement(schedule, weights, calibration, budget)
        assert seconds["auto"] <= 1.02 * min(seconds.values())
        # Prefixes hide behind the link what whole weights are read for after it.
        assert seconds["split"] < seconds["in-place"]


def test_auto_splits_where_it_can_and_it_pays(llama: tuple[Schedule, dict[str, Weight]]) -> None:
    """With copies that are as fast as reads, a ring is what splitting saves."""
    schedule, weights = llama
    usual = times(schedule, weights, DIRECT_BYTES_PER_S)
    calibration = replace(usual, link=replace(usual.link, bytes_per_s=DIRECT_BYTES_PER_S))
    budget = 8_000_000_000
    can = planner([schedule], weights, "auto", LARGE_PAGE)
    cannot = Planner([schedule], weights, page_bytes=LARGE_PAGE, placement="auto", can_split=False)
    split, other = can.plan(budget, calibration), cannot.plan(budget, calibration)
    check_plan(split, [schedule], weights, budget_bytes=budget)
    assert split.split_weights and not other.split_weights
    assert can.predicted_s(split, calibration) < cannot.predicted_s(other, calibration)
    # Nothing is guessed: without times of reads in place there are none.
    untimed = can.plan(budget, replace(calibration, direct_step_s={}))
    assert not untimed.split_weights and untimed.direct_weights == ("embedding",)
