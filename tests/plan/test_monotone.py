"""More memory takes no longer: over random programs and budgets, without times and with measured ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.calibration import Calibration, Link
from penstock.plan.check import check_plan
from penstock.plan.menu import Menu
from penstock.plan.nominal import nominal
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import AS_FAST
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.record import recorder
from tests.plan.record.schedules import PROGRAMS
from tests.plan.test_floor import chain, weights_of
from tests.plan.test_planner import programs

PAGE = 4096

Program = tuple[list[Schedule], dict[str, Weight]]


def steps_up(
    program: Program, page_bytes: int, budgets: Callable[[Planner], Sequence[int]], calibration: Calibration | None
) -> list[tuple[float, float]]:
    """By step from one budget to the next larger one: the times before and after."""
    schedules, weights = program
    planner = Planner(schedules, weights, page_bytes=page_bytes)
    machines = [calibration] if calibration is not None else nominal(Menu(tuple(schedules), weights, page_bytes))
    times: list[float] = []
    for budget_bytes in budgets(planner):
        plan: Plan = planner.plan(budget_bytes, calibration)
        check_plan(plan, schedules, weights, budget_bytes=budget_bytes)
        times.append(sum(predicted_s(plan, schedules, machine) for machine in machines))
    return list(pairwise(times))


def slower(found: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(before, after) for before, after in found if after > before * AS_FAST]


def timed(schedules: Sequence[Schedule], seed: int) -> Calibration:
    draw = random.Random(seed)
    return Calibration(
        Link(1e9, 1e-6), {one.method: tuple(draw.uniform(0, 2e-5) for _ in one.steps) for one in schedules}
    )


def by_page(planner: Planner) -> list[int]:
    return [*range(planner.floor_bytes, planner.full_bytes, PAGE), planner.full_bytes]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), calibrated=st.booleans())
def test_any_program_page_by_page(data: st.DataObject, seed: int, calibrated: bool) -> None:
    schedules, weights = data.draw(programs(PAGE))
    calibration = timed(schedules, seed) if calibrated else None
    assert slower(steps_up((schedules, weights), PAGE, by_page, calibration)) == []


@pytest.mark.parametrize("calibrated", [False, True])
def test_chains_of_few_weights_page_by_page(calibrated: bool) -> None:
    """Every weight streams there, and rings of a few suffixes come out even or do not."""
    found: list[tuple[float, float]] = []
    for seed in range(6):
        draw = random.Random(seed)
        sizes = {f"w{index}": draw.randint(1, 6) * PAGE for index in range(draw.randint(6, 11))}
        program = [chain(*sizes)], weights_of(**sizes)
        found += steps_up(program, PAGE, by_page, timed(program[0], seed) if calibrated else None)
    assert len(found) > 50 and slower(found) == []


@pytest.mark.parametrize("name", ["tied_decoder", "albert", "shared_layers", "one_giant"])
def test_programs_of_the_record(name: str) -> None:
    """With more accesses luck counts for less, and smaller budgets are not looked at: hardly any step is slower."""
    made = PROGRAMS[name]()
    program = list(made.schedules), dict(made.weights)

    def budgets(planner: Planner) -> list[int]:
        return [recorder.budget_bytes(planner.floor_bytes, planner.full_bytes, percent) for percent in range(0, 100, 8)]

    found = steps_up(program, recorder.page_bytes(made, "cuda"), budgets, None)
    assert all(after <= before * 1.002 for before, after in found)


def test_more_accesses_with_reuse() -> None:
    """Small pages, weights of odd sizes, and a third of them read twice: there it is luck, and now and then some."""
    found: list[tuple[float, float]] = []
    for accesses in (24, 60):
        draw = random.Random(accesses)
        sizes = {f"w{index}": draw.randint(1, 30) * PAGE - draw.randint(0, PAGE - 1) for index in range(accesses)}
        order = [*sizes, *(draw.choice([*sizes]) for _ in range(accesses // 3))]

        def budgets(planner: Planner) -> list[int]:
            apart = (planner.full_bytes - planner.floor_bytes) // 12 // PAGE * PAGE
            return [*range(planner.floor_bytes, planner.full_bytes, apart), planner.full_bytes]

        found += steps_up(([chain(*order)], weights_of(**sizes)), PAGE, budgets, None)
    assert len(found) > 22 and len(slower(found)) <= 1
    assert all(after <= before * 1.05 for before, after in found)
