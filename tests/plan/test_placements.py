"""What is read in place, in every placement and at every budget; and that what comes out is a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BelowFloorError
from penstock.placement_names import PLANNED
from penstock.plan.calibration import Calibration, Link
from penstock.plan.check import PlanError, check_plan
from penstock.plan.menu import Menu
from penstock.plan.menu_planner import MenuPlanner
from penstock.plan.plan import DIRECT, Plan
from penstock.plan.planner import Planner
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight
from tests.plan.test_floor import llama_3_8b, weights_of
from tests.runtime.session_harness import chain

PAGE = 16


def planner(
    schedules: list[Schedule], weights: dict[str, Weight], placement: str = "auto", page: int = PAGE
) -> Planner:
    return Planner(schedules, weights, page_bytes=page, placement=placement)


def direct_positions(plan: Plan, method: int = 0) -> list[int]:
    return [index for index, placed in enumerate(plan.methods[method].placements) if placed.is_direct]


# ---- by hand


def test_a_table_that_is_gathered_from_leaves_the_floor_and_takes_no_memory() -> None:
    schedule, weights = chain("~table", *"abcdef"), weights_of(table=1000, **dict.fromkeys("abcdef", 32))
    auto = planner([schedule], weights)
    without = Planner([chain("none", *"abcdef")], weights_of(none=0, **dict.fromkeys("abcdef", 32)), page_bytes=PAGE)
    assert auto.floor_bytes == without.floor_bytes == 96
    assert planner([schedule], weights, "stream").floor_bytes > 1000
    plan = auto.plan(96)
    check_plan(plan, [schedule], weights, budget_bytes=96)
    assert direct_positions(plan) == [0] and plan.direct_weights == ("table",)
    (table, *_) = plan.methods[0].placements
    assert (table.weight, table.nbytes, table.range_index, table.stay) == ("table", 1000, DIRECT, None)
    # Neither copied nor found on the device.
    assert plan.methods[0].warm == replace(without.plan(96).methods[0].warm, bytes_in_place=1000)
    assert auto.floor().plan.direct_weights == ("table",) and auto.floor().floor_bytes == 96


def test_a_tied_table_is_gathered_in_place_where_its_projection_streams() -> None:
    schedule = chain("~table", *"abcdef", "table")
    weights = weights_of(table=100, **dict.fromkeys("abcdef", 32))
    auto = planner([schedule], weights)
    plan = auto.plan(auto.floor_bytes)
    check_plan(plan, [schedule], weights, budget_bytes=auto.floor_bytes)
    assert direct_positions(plan) == [0]
    assert plan.methods[0].placements[7].stay is not None


def test_a_tied_table_whose_projection_is_resident_is_gathered_from_there() -> None:
    schedule = chain("~table", *"abcdef", "!table")
    weights = weights_of(table=100, **dict.fromkeys("abcdef", 32))
    auto = planner([schedule], weights)
    plan = auto.plan(auto.floor_bytes)
    check_plan(plan, [schedule], weights, budget_bytes=auto.floor_bytes)
    assert not plan.direct_weights
    gathered, projected = plan.methods[0].placements[0], plan.methods[0].placements[7]
    assert (gathered.range_index, gathered.range_offset_bytes) == (projected.range_index, projected.range_offset_bytes)
    # Both find it on the device.
    assert plan.methods[0].warm.bytes_hit == 2 * 100 + 6 * 32 - plan.methods[0].warm.bytes_streamed


def test_with_memory_to_spare_tables_are_held_as_far_as_it_goes() -> None:
    schedule = chain("~large", "~small", *"abc")
    weights = weights_of(large=160, small=48, **dict.fromkeys("abc", 32))
    auto = planner([schedule], weights)
    held = {budget: auto.plan(budget).direct_weights for budget in (96, 143, 144, 255, 256, 303, 304, 1000)}
    assert held == {
        96: ("large", "small"),
        143: ("large", "small"),
        144: ("large",),
        255: ("large",),
        256: ("small",),
        303: ("small",),
        304: (),
        1000: (),
    }
    assert auto.full_bytes == 304
    for budget in held:
        plan = auto.plan(budget)
        check_plan(plan, [schedule], weights, budget_bytes=budget)
        assert plan.methods[0].warm.bytes_streamed == 0


def test_where_everything_is_direct_the_floor_is_zero() -> None:
    schedule, weights = chain(*"abc", "a"), weights_of(a=100, b=10, c=1)
    direct = planner([schedule], weights, "in-place")
    assert direct.floor_bytes == 0
    plan = direct.plan(0)
    check_plan(plan, [schedule], weights, budget_bytes=0)
    assert plan.device_bytes == 0 and direct_positions(plan) == [0, 1, 2, 3]
    only_tables = planner([chain("~a", "~b")], weights)
    assert only_tables.floor_bytes == 0 and direct_positions(only_tables.plan(0)) == [0, 1]


def test_in_place_the_budget_holds_what_is_read_most() -> None:
    schedule, weights = chain("~t", "a", "b", "a"), weights_of(t=16, a=32, b=32)
    direct = planner([schedule], weights, "in-place")
    assert [direct.plan(budget).direct_weights for budget in (0, 31, 32, 48, 64, 79, 80)] == [
        ("t", "a", "b"),
        # a would take two pages of 16.
        ("a", "b"),
        ("t", "b"),
        ("b",),
        ("t",),
        ("t",),
        (),
    ]


def test_small_tables_are_packed_with_the_rest() -> None:
    page = 2 * 2**20
    sizes = {"table": 100_000, "large": 300_000, **dict.fromkeys("abcdef", 3 * page)}
    schedule, weights = chain("~table", "~large", *"abcdef"), weights_of(**sizes)
    auto = planner([schedule], weights, page=page)
    assert auto.plan(auto.floor_bytes).direct_weights == ("large",)


def test_pinned_accesses_are_never_direct() -> None:
    schedule = Schedule("forward", (Access(0, "t", pinned=True, gathered=True),), (Step("k", (0,)),))
    for placement in PLANNED:
        made = planner([schedule], weights_of(t=100), placement)
        assert made.floor_bytes == 112 and not made.plan(112).direct_weights
        with pytest.raises(BelowFloorError):
            made.plan(111)


def test_a_placement_that_is_none_is_refused() -> None:
    with pytest.raises(
        ValueError, match="placement is 'fast'; it must be one of 'auto', 'stream', 'in-place', 'split'"
    ):
        planner([chain("a")], weights_of(a=1), "fast")


def test_the_checker_refuses_a_pinned_access_that_is_direct() -> None:
    loose, pinned, weights = chain("a", "b"), chain("!a", "b"), weights_of(a=16, b=16)
    plan = planner([loose], weights, "in-place").plan(0)
    check_plan(plan, [loose], weights, budget_bytes=0)
    with pytest.raises(PlanError, match="'a' is direct, but pinned"):
        check_plan(plan, [pinned], weights, budget_bytes=0)


# ---- by the clock

LINK = Link(55e9, 2.9e-6)
DEVICE_BYTES_PER_S, DIRECT_BYTES_PER_S, LAUNCH_S = 4e12, 51.4e9, 2e-6
LARGE_PAGE = 2 * 2**20


def times(schedule: Schedule, weights: dict[str, Weight], direct_bytes_per_s: float) -> Calibration:
    """Steps bound by their reads: as a GPU decodes one token."""

    def read_bytes(step: Step) -> int:
        read = [schedule.access_by_number[number] for number in step.accesses]
        return sum(weights[access.weight].nbytes for access in read if not access.gathered)

    step_s = tuple(read_bytes(step) / DEVICE_BYTES_PER_S + LAUNCH_S for step in schedule.steps)
    direct_s = tuple(
        max(read_bytes(step) / direct_bytes_per_s, usual_s)
        for step, usual_s in zip(schedule.steps, step_s, strict=True)
    )
    return Calibration(LINK, {schedule.method: step_s}, {schedule.method: direct_s})


def seconds_by_placement(
    schedule: Schedule, weights: dict[str, Weight], calibration: Calibration, budget: int
) -> dict[str, float]:
    found = {}
    for placement in PLANNED:
        made = planner([schedule], weights, placement, LARGE_PAGE)
        plan = made.plan(budget, calibration)
        check_plan(plan, [schedule], weights, budget_bytes=budget)
        found[placement] = made.predicted_s(plan, calibration)
    return found


@pytest.fixture(scope="module")
def llama() -> tuple[Schedule, dict[str, Weight]]:
    """A vocabulary of 128,256: the output projection is a fifteenth of all weights and sets the floor."""
    schedule, weights = llama_3_8b(fused_norms=True)
    accesses = tuple(replace(access, gathered=access.weight == "embedding") for access in schedule.accesses)
    return replace(schedule, accesses=accesses), weights


def test_near_the_floor_of_a_large_vocabulary_auto_beats_every_pure_placement(
    llama: tuple[Schedule, dict[str, Weight]],
) -> None:
    schedule, weights = llama
    calibration = times(schedule, weights, DIRECT_BYTES_PER_S)
    floor = planner([schedule], weights, "stream", LARGE_PAGE).floor_bytes
    seconds = seconds_by_placement(schedule, weights, calibration, floor)
    assert seconds["auto"] < 0.95 * seconds["stream"] and seconds["auto"] < 0.95 * seconds["in-place"]


@pytest.mark.parametrize("direct_bytes_per_s", [DIRECT_BYTES_PER_S, 6.4e9])
def test_at_no_budget_is_auto_slower_than_a_pure_placement(
    llama: tuple[Schedule, dict[str, Weight]], direct_bytes_per_s: float
) -> None:
    """Reads in place that are as fast as copies, and such as a product of 2,048 rows makes."""
    schedule, weights = llama
    calibration = times(schedule, weights, direct_bytes_per_s)
    for budget in (4_000_000_000, 14_000_000_000):
        seconds = seconds_by_placement(schedule, weights, calibration, budget)
        assert seconds["auto"] <= 1.02 * min(seconds.values())
    if direct_bytes_per_s < DIRECT_BYTES_PER_S:
        plan = planner([schedule], weights, page=LARGE_PAGE).plan(4_000_000_000, calibration)
        assert plan.direct_weights == ("embedding",)


def test_a_read_in_place_that_was_not_timed_cannot_be_simulated() -> None:
    schedule, weights = chain("a", "b"), weights_of(a=16, b=16)
    direct = planner([schedule], weights, "in-place")
    untimed = Calibration(LINK, {"forward": (1e-3, 1e-3)})
    with pytest.raises(ValueError, match="reads weights in place, and got the times of 0 such steps; it has 2"):
        direct.predicted_s(direct.plan(0), untimed)


def test_where_one_method_was_not_timed_in_place_nothing_is_guessed() -> None:
    """It might have many rows, and take many times as long."""
    schedules = [chain("a", "b", method="prefill"), chain("a", "b", method="decode")]
    both, one = {"prefill": (1e-3, 1e-3), "decode": (1e-3, 1e-3)}, {"decode": (1e-6, 1e-6)}
    auto = planner(schedules, weights_of(a=16, b=16))
    for step_s, direct_step_s in ((both, one), (one, both)):
        with pytest.raises(ValueError, match="reads in place were timed, but not in method 'prefill'"):
            auto.plan(32, Calibration(LINK, step_s, direct_step_s))


def test_copies_stand_still_while_a_weight_is_read_in_place() -> None:
    """One of twelve weights is read in place, the others are copied: all cross one link."""
    names, nbytes = "abcdefghijkl", 55_000_000
    schedule, weights = chain(*names), weights_of(**dict.fromkeys(names, nbytes))
    auto = planner([schedule], weights, page=LARGE_PAGE)
    timed = Calibration(Link(55e9), {"forward": (1e-5,) * 12}, {"forward": (1e-3,) * 12})
    everything = planner([schedule], weights, "in-place", LARGE_PAGE).plan(0)
    assert auto.predicted_s(everything, timed) == pytest.approx(12e-3)
    chosen = MenuPlanner(Menu((schedule,), weights, LARGE_PAGE, lambda access: access.weight == "b"))
    mixed = chosen.plan(chosen.floor_bytes, None)
    assert mixed.direct_weights == ("b",)
    crossing_bytes = mixed.methods[0].warm.bytes_streamed + nbytes
    assert crossing_bytes > 8 * nbytes
    assert crossing_bytes / 55e9 <= auto.predicted_s(mixed, timed) < 1.1 * crossing_bytes / 55e9


def test_where_copying_all_needs_less_the_floor_is_that_of_copying() -> None:
    """In four steps all stays overlap each other, and a table that is not copied leaves another order to place."""
    schedule = chain("a", "b c", "a", "~d e")
    weights = weights_of(a=0, b=1, c=17, d=1, e=17)
    auto, streamed = planner([schedule], weights, "auto"), planner([schedule], weights, "stream")
    without_table = MenuPlanner(Menu((schedule,), weights, PAGE, lambda access: access.gathered))
    assert streamed.floor_bytes < without_table.floor_bytes, "no odd case any more: find another"
    assert auto.floor_bytes == auto.floor().floor_bytes == streamed.floor_bytes
    check_plan(auto.plan(auto.floor_bytes), [schedule], weights, budget_bytes=auto.floor_bytes)
    assert auto.plan(without_table.floor_bytes).direct_weights == ("d",)
    with pytest.raises(BelowFloorError):
        auto.plan(auto.floor_bytes - 1)


# ---- at random


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Schedule], dict[str, Weight]]:
    names = [f"w{index}" for index in range(draw(st.integers(1, 8)))]
    weights = weights_of(**{name: draw(st.integers(0, 100)) for name in names})
    mark = st.sampled_from(["", "", "~", "~", "!"])
    step = st.lists(st.builds(str.__add__, mark, st.sampled_from(names)), min_size=1, max_size=2).map(" ".join)
    methods = draw(st.lists(st.lists(step, min_size=1, max_size=8), min_size=1, max_size=2))
    return [chain(*steps, method=f"m{index}") for index, steps in enumerate(methods)], weights


@given(
    program=programs(), placement=st.sampled_from(PLANNED), parts=st.lists(st.integers(0, 20), min_size=1, max_size=3)
)
@settings(max_examples=150, deadline=None)
def test_every_plan_is_safe_and_within_its_budget(
    program: tuple[list[Schedule], dict[str, Weight]], placement: str, parts: list[int]
) -> None:
    schedules, weights = program
    made = planner(schedules, weights, placement)
    floor, full = made.floor_bytes, made.full_bytes
    # Tables take no memory that they can do without: never more than where they stream.
    assert floor <= planner(schedules, weights, "stream").floor_bytes
    pinned = {access.weight for schedule in schedules for access in schedule.accesses if access.pinned}
    if placement == "in-place":
        assert (floor == 0) == (not any(weights[name].nbytes for name in pinned))
    for part in parts:
        budget = floor + max(full - floor, 0) * part // 20
        plan = made.plan(budget)
        check_plan(plan, schedules, weights, budget_bytes=budget)
        for schedule, method in zip(schedules, plan.methods, strict=True):
            for access, placed in zip(schedule.accesses, method.placements, strict=True):
                if placed.is_direct:
                    assert placement == "in-place" or (placement in ("auto", "split") and access.gathered)
                elif placed.stay is not None:
                    assert placement != "in-place"
        if budget >= full:
            assert not plan.direct_weights and not any(method.copies for method in plan.methods)
    if floor:
        with pytest.raises(BelowFloorError):
            made.plan(floor - 1)
