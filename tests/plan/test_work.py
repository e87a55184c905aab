"""What planning does for programs of many accesses, counted: times would depend on the machine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.plan import candidates, ring
from penstock.plan.check import check_plan
from penstock.plan.planner import Planner
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.test_floor import chain, weights_of

PAGE = 2 * 2**20
ACCESSES = 2_500


def decoder() -> tuple[list[Schedule], dict[str, Weight]]:
    sizes = (8192, 33 << 20, 8 << 20, 8 << 20, 33 << 20, 8192, 112 << 20, 112 << 20, 112 << 20)
    weights = weights_of(**{f"w{index}": sizes[index % len(sizes)] for index in range(ACCESSES)})
    return [chain(*weights)], weights


def any_sizes() -> tuple[list[Schedule], dict[str, Weight]]:
    draw = random.Random(1)
    weights = weights_of(**{f"w{index}": draw.randint(1, 60 << 20) for index in range(ACCESSES)})
    return [chain(*weights)], weights


def repeated() -> tuple[list[Schedule], dict[str, Weight]]:
    draw = random.Random(2)
    weights = weights_of(**{f"w{index}": draw.randint(1, 60 << 20) for index in range(ACCESSES // 5)})
    steps = [name for name in weights for _ in range(5)]
    draw.shuffle(steps)
    return [chain(*steps)], weights


def two_methods() -> tuple[list[Schedule], dict[str, Weight]]:
    draw = random.Random(3)
    names = [f"w{index}" for index in range(ACCESSES // 2)]
    weights = weights_of(**{name: draw.randint(1, 60 << 20) for name in names})
    half = len(names) // 2
    return [chain(*names, method="prefill"), chain(*names[half:], *names[:half], method="decode")], weights


@pytest.fixture
def gone_through(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By function: accesses or live ranges gone through. Each is linear in them, and together they are planning."""
    passed: Counter[str] = Counter()

    def counted(module: Any, name: str, key: str, length: Callable[[Any], int]) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def call(first: Any, *args: Any, **options: Any) -> Any:
            passed[key] += length(first)
            return function(first, *args, **options)

        monkeypatch.setattr(module, name, call)

    # As the floor calls it, and as drafts do.
    counted(ring, "allocate", "floor", lambda method: len(method.live_ranges))
    counted(candidates, "allocate", "drafts", lambda method: len(method.live_ranges))
    counted(candidates, "live_ranges", "live_ranges", lambda schedule: len(schedule.accesses))
    return passed


@pytest.mark.parametrize("program", [decoder, any_sizes, repeated, two_methods])
def test_many_accesses_are_gone_through_a_few_times(
    program: Callable[[], tuple[list[Schedule], dict[str, Weight]]], gone_through: Counter[str]
) -> None:
    schedules, weights = program()
    planner = Planner(schedules, weights, page_bytes=PAGE)
    assert not gone_through
    budgets = [planner.floor_bytes, *(planner.full_bytes * percent // 100 for percent in (25, 50, 90))]
    assert gone_through["floor"] <= 2 * ACCESSES and gone_through["live_ranges"] <= 4 * ACCESSES
    for budget_bytes in budgets:
        fresh = Planner(schedules, weights, page_bytes=PAGE)
        gone_through.clear()
        plan = fresh.plan(budget_bytes)
        assert plan.device_bytes <= budget_bytes and plan.ring_bytes > 0
        assert gone_through["drafts"] <= 3 * ACCESSES
        assert gone_through["live_ranges"] <= 5 * ACCESSES
        assert gone_through["floor"] <= 5 * ACCESSES
    check_plan(plan, schedules, weights, budget_bytes=budget_bytes)


@pytest.mark.parametrize("program", [decoder, any_sizes, two_methods])
def test_a_budget_well_above_the_floor_needs_no_exact_floor(
    program: Callable[[], tuple[list[Schedule], dict[str, Weight]]], gone_through: Counter[str]
) -> None:
    schedules, weights = program()
    planner = Planner(schedules, weights, page_bytes=PAGE)
    planner.plan(planner.full_bytes // 2)
    assert gone_through["floor"] == 0 and gone_through["drafts"] > 0
    # Not even for a second plan; asked for, the floor is found once.
    planner.plan(planner.full_bytes // 4)
    assert gone_through["floor"] == 0
    assert planner.floor_bytes < planner.full_bytes // 4
    once = gone_through["floor"]
    assert planner.floor().floor_bytes == planner.floor_bytes and gone_through["floor"] == once > 0
