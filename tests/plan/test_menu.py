"""The menu: rows of every kind in one plan, filled to the page, and beside brute force over all ways to fill it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.calibration import Calibration, Link
from penstock.plan.candidates import Streaming
from penstock.plan.check import check_plan
from penstock.plan.menu import Menu
from penstock.plan.menu_planner import MenuPlanner
from penstock.plan.packed import BLOCK_BYTES
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import AS_FAST
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.planning import drafted_with
from tests.plan.test_floor import weights_of
from tests.plan.test_packed import begins_of
from tests.plan.test_split import linear
from tests.runtime.session_harness import chain

PAGE = BLOCK_BYTES
LINK = Link(1e9, 1e-6)


def packed_menu(sizes: dict[str, int], names: list[str], page_bytes: int = PAGE) -> Menu:
    """A chain in which every weight of these names is packed."""
    begins = {name: begins_of(sizes[name]) for name in names}
    return Menu((chain(*sizes),), weights_of(**sizes), page_bytes, begins=begins)


def timed(menu: Menu, step_s: float, decoded_bytes_per_s: float = 40e9) -> Calibration:
    steps = {schedule.method: (step_s,) * len(schedule.steps) for schedule in menu.schedules}
    return Calibration(LINK, steps, decoded_bytes_per_s=decoded_bytes_per_s)


def check(plan: Plan, menu: Menu, budget_bytes: int) -> None:
    check_plan(plan, menu.schedules, menu.weights, budget_bytes=budget_bytes, packed=menu.begins)


def unused_bytes(plan: Plan, budget_bytes: int) -> int:
    return budget_bytes - plan.device_bytes


# ---- packed rows


@pytest.mark.parametrize("seed", range(6))
def test_beside_every_cap_ring_and_part_there_is(seed: int) -> None:
    """Steps from none to as long as the link, decoders from faster than memory to slower than the link."""
    draw = random.Random(seed)
    sizes = {f"w{index}": draw.randint(2, 8) * PAGE for index in range(7)}
    menu = packed_menu(sizes, [name for name in sizes if draw.random() < 0.8])
    planner = MenuPlanner(menu)
    calibration = timed(menu, draw.choice([0.0, 1e-4, 4e-4]), draw.choice([100e9, 5e9, 0.5e9]))
    budget_bytes = planner.floor_bytes + (menu.full_pages * PAGE - planner.floor_bytes) * draw.randint(1, 9) // 10
    slots = menu.slots(budget_bytes, planner._streaming_floor_bytes)[0]
    room_pages = (budget_bytes - slots.total_bytes) // PAGE
    streaming = Streaming.of(menu.demand, menu.demand.nbytes)
    best_s, tried = float("inf"), 0
    for cap, ahead, eighths in itertools.product(range(0, 9), range(0, 9), range(0, 9)):
        drafted = drafted_with(streaming, menu, room_pages, cap, ahead, eighths / 8)
        plan = None if drafted is None else drafted.plan()
        if plan is not None:
            whole = menu.finished(plan, budget_bytes, {}, slots)
            check(whole, menu, budget_bytes)
            best_s, tried = min(best_s, predicted_s(whole, menu.schedules, calibration)), tried + 1
    assert tried > 20
    found = planner.plan(budget_bytes, calibration)
    check(found, menu, budget_bytes)
    assert predicted_s(found, menu.schedules, calibration) <= best_s * 1.03


def test_a_decoder_that_is_slower_than_the_link_leaves_weights_as_they_are() -> None:
    sizes = {f"w{index}": 16 * PAGE for index in range(8)}
    menu = packed_menu(sizes, [*sizes])
    planner = MenuPlanner(menu)
    budget_bytes = 90 * PAGE

    def resident_bytes(decoded_bytes_per_s: float) -> int:
        """As they are decoded."""
        plan = planner.plan(budget_bytes, timed(menu, 1e-3, decoded_bytes_per_s))
        check(plan, menu, budget_bytes)
        return sum(piece.nbytes for piece in plan.fills)

    assert resident_bytes(0.05e9) > 40 * PAGE > 20 * PAGE > resident_bytes(100e9)


@settings(max_examples=30, deadline=None)
@given(
    pages=st.lists(st.integers(1, 12), min_size=4, max_size=9),
    packed=st.integers(0, 2**9 - 1),
    percent=st.integers(0, 99),
)
def test_packed_weights_fill_the_budget_and_more_of_it_streams_no_more(
    pages: list[int], packed: int, percent: int
) -> None:
    sizes = {f"w{index}": count * PAGE - 16 * index for index, count in enumerate(pages)}
    menu = packed_menu(sizes, [f"w{index}" for index in range(len(pages)) if packed >> index & 1])
    planner = MenuPlanner(menu)
    floor, full = planner.floor_bytes, planner.full_bytes
    budget_bytes = floor + (full - floor) * percent // 100
    plan = planner.plan(budget_bytes)
    check(plan, menu, budget_bytes)
    streamed = sum(method.warm.bytes_streamed for method in plan.methods)
    if streamed and budget_bytes > floor + 4 * PAGE:
        # Two pages of a weight go together where the last holds next to nothing, and a store begins with a page.
        assert unused_bytes(plan, budget_bytes) <= 4 * PAGE


# ---- all rows in one plan


def mixed() -> tuple[Schedule, dict[str, Weight]]:
    """A table to gather from, products that can be split, and weights that only stream."""
    names = [f"p{index}" for index in range(4)]
    weights = {name: Weight(name, "bfloat16", (1024, 256), (0, 1)) for name in names}
    weights |= weights_of(table=40 * 65536, a=8 * 65536, b=8 * 65536, c=8 * 65536, d=8 * 65536)
    return linear(chain("~table", "a", "p0", "b", "p1", "c", "p2", "d", "p3"), names), weights


def test_slots_are_few_and_large_where_copies_cost_much_and_more_where_they_run_ahead() -> None:
    """The same bytes: a copy that costs as much as its bytes wants two slots. Where copies cost nothing beside their
    bytes, neither is slower than the other division would be."""
    menu = packed_menu({f"w{i}": 24 * BLOCK_BYTES for i in range(12)}, [f"w{i}" for i in range(12)])
    planner = MenuPlanner(menu)
    budget_bytes = planner.floor_bytes + 40 * PAGE
    steps = {"forward": (1e-6,) * 12}
    for latency_s in (0.0, 1e-3):
        calibration = Calibration(Link(1e9, latency_s), steps, decoded_bytes_per_s=40e9)
        plan = planner.plan(budget_bytes, calibration)
        check(plan, menu, budget_bytes)
        assert plan.slots is not None
        divided = menu.slots(budget_bytes, planner._streaming_floor_bytes)
        assert len({one.count for one in divided}) > 1
        others = [replace(plan, slots=replace(plan.slots, count=one.count, nbytes=one.nbytes)) for one in divided]
        predicted = [predicted_s(other, menu.schedules, calibration) for other in others]
        assert predicted_s(plan, menu.schedules, calibration) <= AS_FAST * min(predicted)
        if latency_s:
            assert plan.slots.count == 2


def test_one_plan_has_a_ring_and_prefixes_by_the_time_they_save() -> None:
    schedule, weights = mixed()
    # Reads in place are a little faster than copies for p0, and four times as slow for the others.
    steps = len(schedule.steps)
    direct_s = [1e-6] * steps
    for index, access in enumerate(schedule.accesses):
        if access.linear:
            direct_s[index] = weights[access.weight].nbytes / (1.1e9 if access.weight == "p0" else 0.25e9)
    calibration = Calibration(LINK, {"forward": (1e-5,) * steps}, {"forward": tuple(direct_s)})
    menu = Menu((schedule,), weights, 65536, lambda access: access.gathered, lambda access: access.linear)
    planner = MenuPlanner(menu)
    budget_bytes = planner.floor_bytes + 6 * 65536
    plan = planner.plan(budget_bytes, calibration)
    check_plan(plan, [schedule], weights, budget_bytes=budget_bytes)
    placed = {one.weight: one for one in plan.methods[0].placements}
    assert placed["table"].is_direct and plan.ring_bytes
    # A page of p1 saves four times what one of p0 does: p0 gets what the others leave.
    assert placed["p0"].in_place_bytes >= max(placed[name].in_place_bytes for name in ("p1", "p2", "p3"))
    alone = Planner([schedule], weights, page_bytes=65536, placement="split").plan(budget_bytes)
    assert planner.seconds(plan, calibration) <= planner.seconds(alone, calibration)


def test_tables_come_after_everything_that_streams() -> None:
    schedule, weights = mixed()
    planner = Planner([schedule], weights, page_bytes=65536, placement="auto", can_split=False)
    without_table = sum(weight.nbytes for name, weight in weights.items() if name != "table")
    for pages, is_held in ((0, False), (39, False), (40, True)):
        plan = planner.plan(without_table + pages * 65536)
        assert (not plan.direct_weights) == is_held
        assert not any(method.copies for method in plan.methods)
    assert planner.plan(without_table - 65536).methods[0].copies
