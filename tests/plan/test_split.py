"""Weights that are split: where their prefixes lie, how much of each, and that what comes out is a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration, Link
from penstock.plan.check import check_plan
from penstock.plan.in_place import FreePages, SplittableWeight, allocate_prefixes, host_times
from penstock.plan.menu import Menu
from penstock.plan.menu_planner import MenuPlanner
from penstock.plan.plan import DIRECT, SPLIT_ROWS, Plan
from penstock.plan.planner import Planner
from penstock.plan.simulator import simulate
from penstock.plan.tuning import PREFIX_GRAIN_ROWS
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.runtime.session_harness import chain

ROW = 16  # bytes: eight columns of two bytes
PAGE = 512


def matrices(**rows: int) -> dict[str, Weight]:
    return {name: Weight(name, "bfloat16", (count, ROW // 2), (0, 1)) for name, count in rows.items()}


def linear(schedule: Schedule, names: Collection[str]) -> Schedule:
    """Accesses of these weights multiply, unless they gather."""
    accesses = (replace(one, linear=one.weight in names and not one.gathered) for one in schedule.accesses)
    return replace(schedule, accesses=tuple(accesses))


def planner(schedules: Sequence[Schedule], weights: dict[str, Weight], placement: str = "split") -> Planner:
    return Planner(schedules, weights, page_bytes=PAGE, placement=placement)


def kinds(plan: Plan, method: int = 0) -> list[str]:
    def kind(index: int) -> str:
        placed = plan.methods[method].placements[index]
        return (
            "split"
            if placed.is_split
            else "direct"
            if placed.is_direct
            else "resident"
            if placed.stay is None
            else "ring"
        )

    return [kind(index) for index in range(len(plan.methods[method].placements))]


def prefixes(plan: Plan) -> dict[str, int]:
    placed = (one for method in plan.methods for one in method.placements)
    return {one.weight: one.prefix_bytes for one in placed if one.prefix_bytes is not None}


# ---- by hand


def test_linear_weights_leave_the_floor_and_the_rest_streams() -> None:
    weights = matrices(big=1000, **dict.fromkeys("abcdef", 64))
    schedule = linear(chain("big", *"abcdef"), ["big"])
    split = planner([schedule], weights)
    alone = planner([chain(*"abcdef")], weights)
    assert split.floor_bytes == alone.floor_bytes == 3 * 1024
    assert planner([schedule], weights, "stream").floor_bytes > 16_000
    plan = split.plan(split.floor_bytes)
    check_plan(plan, [schedule], weights, budget_bytes=split.floor_bytes)
    assert kinds(plan)[0] == "direct" and "ring" in kinds(plan)
    assert split.floor().plan.direct_weights == ("big",)
    with pytest.raises(BelowFloorError):
        split.plan(split.floor_bytes - 1)


def test_what_the_rest_leaves_goes_to_prefixes() -> None:
    weights = matrices(x=1000, y=1000, a=64, b=64)
    schedule = linear(chain("a", "x", "b", "y", "x"), ["x", "y"])
    split = planner([schedule], weights)
    budget = 4 * PAGE + 30 * PAGE
    plan = split.plan(budget)
    check_plan(plan, [schedule], weights, budget_bytes=budget)
    assert kinds(plan) == ["resident", "split", "resident", "split", "split"]
    # 15 pages of 32 rows are 480 rows, of which 384 are a multiple of 128: 12 pages. Of six left over x takes four.
    assert prefixes(plan) == {"x": 512 * ROW, "y": 384 * ROW} and plan.split_weights == ("x", "y")
    assert not plan.direct_weights
    first, second = plan.methods[0].placements[1], plan.methods[0].placements[4]
    assert (first.range_index, first.prefix_bytes) == (second.range_index, second.prefix_bytes)
    assert (first.range_offset_bytes, first.stay) == (0, None)
    assert first.in_place_bytes == 488 * ROW
    fill = next(piece for piece in plan.fills if piece.weight == "x")
    assert (fill.range_index, fill.nbytes, fill.weight_offset_bytes) == (first.range_index, 512 * ROW, 0)
    # Neither streamed nor found on the device: only a and b are hits.
    assert plan.methods[0].warm.bytes_hit == 2 * 64 * ROW and plan.methods[0].warm.bytes_streamed == 0


def test_without_memory_it_is_direct_and_with_enough_it_is_held() -> None:
    weights = matrices(x=1000, y=1000, a=64)
    schedule = linear(chain("a", "x", "y"), ["x", "y"])
    split = planner([schedule], weights)
    nothing = split.plan(2 * PAGE)
    assert kinds(nothing) == ["resident", "direct", "direct"] and nothing.methods[0].placements[1].range_index == DIRECT
    assert split.full_bytes == -(-2064 * ROW // PAGE) * PAGE
    assert kinds(split.plan(split.full_bytes)) == ["resident"] * 3
    # One page less, and one weight is whole where the other is nearly so.
    short = split.plan(split.full_bytes - PAGE)
    check_plan(short, [schedule], weights, budget_bytes=split.full_bytes - PAGE)
    assert kinds(short).count("split") == 1 and kinds(short).count("resident") == 2


def test_a_tied_table_is_gathered_in_host_memory_and_multiplied_on_both_sides() -> None:
    weights = matrices(table=1000, a=64)
    schedule = linear(chain("~table", "a", "table"), ["table"])
    split = planner([schedule], weights)
    plan = split.plan(12 * PAGE)
    check_plan(plan, [schedule], weights, budget_bytes=12 * PAGE)
    assert kinds(plan) == ["direct", "resident", "split"]
    whole = split.plan(split.full_bytes - PAGE)
    assert kinds(split.plan(split.full_bytes)) == ["resident"] * 3
    assert kinds(whole) == ["direct", "resident", "split"]


def test_tables_are_held_last() -> None:
    weights = matrices(table=300, x=300, a=64)
    schedule = linear(chain("~table", "a", "x"), ["x"])
    split = planner([schedule], weights)
    assert kinds(split.plan(11 * PAGE)) == ["direct", "resident", "split"]
    assert kinds(split.plan(12 * PAGE)) == ["direct", "resident", "resident"]
    assert kinds(split.plan(22 * PAGE)) == ["resident"] * 3
    for pages in range(2, 23):
        check_plan(split.plan(pages * PAGE), [schedule], weights, budget_bytes=pages * PAGE)


def test_of_two_tables_one_is_held() -> None:
    weights = matrices(few=100, many=900, x=300, a=64)
    schedule = linear(chain("~few", "~many", "a", "x"), ["x"])
    split = planner([schedule], weights)
    plan = split.plan(20 * PAGE)
    check_plan(plan, [schedule], weights, budget_bytes=20 * PAGE)
    assert kinds(plan) == ["resident", "direct", "resident", "resident"]


def test_all_that_is_needed_for_everything_is_enough() -> None:
    """Both take one page and a half: apart they would be four."""
    weights = matrices(a=48, x=48)
    schedule = linear(chain("a", "x"), ["x"])
    split = planner([schedule], weights)
    assert split.full_bytes == 3 * PAGE and kinds(split.plan(3 * PAGE)) == ["resident"] * 2


def test_a_weight_that_is_also_read_otherwise() -> None:
    """Split where it is multiplied by; where the rest is held, read there."""
    weights = matrices(x=256, **dict.fromkeys("abcdef", 64))
    schedule = chain("x", *"abcdef", "x")
    first = replace(schedule.accesses[0], linear=True)
    schedule = replace(schedule, accesses=(first, *schedule.accesses[1:]))
    split = planner([schedule], weights)
    plan = split.plan(split.floor_bytes)
    check_plan(plan, [schedule], weights, budget_bytes=split.floor_bytes)
    assert kinds(plan)[0] == "direct" and kinds(plan)[-1] == "ring"
    assert set(kinds(split.plan(split.full_bytes))) == {"resident"}


def test_two_methods_share_a_prefix() -> None:
    weights = matrices(x=1000, y=500)
    schedules = [
        linear(chain("x", "y", method="prefill"), ["x", "y"]),
        linear(chain("y", "x", method="decode"), ["x", "y"]),
    ]
    plan = planner(schedules, weights).plan(20 * PAGE)
    check_plan(plan, schedules, weights, budget_bytes=20 * PAGE)
    placed = [{one.weight: (one.range_index, one.prefix_bytes) for one in method.placements} for method in plan.methods]
    assert placed[0] == placed[1] and len(plan.ranges) == len(plan.fills) == 2


def test_small_weights_are_held_before_any_prefix() -> None:
    """Of a weight that fits in a page there is no prefix: it would take the page all the same."""
    weights = matrices(small=30, tiny=8, x=1000)
    schedule = linear(chain("small", "tiny", "x"), weights)
    split = planner([schedule], weights)
    assert kinds(split.plan(0)) == ["direct"] * 3
    assert kinds(split.plan(PAGE)) == ["direct", "resident", "direct"]
    assert kinds(split.plan(2 * PAGE)) == ["resident", "resident", "direct"]
    assert kinds(split.plan(3 * PAGE)) == ["resident", "resident", "split"]


def test_pinned_weights_are_never_split() -> None:
    weights = matrices(x=1000)
    schedule = chain("!x")
    schedule = replace(schedule, accesses=(replace(schedule.accesses[0], linear=True),))
    split = planner([schedule], weights)
    assert split.floor_bytes == split.full_bytes and kinds(split.plan(split.full_bytes)) == ["resident"]


def test_where_there_is_no_kernel_the_mode_is_refused() -> None:
    weights = matrices(x=1000)
    schedule = linear(chain("x"), weights)
    with pytest.raises(ValueError, match="placement is 'split', which needs a kernel that reads a weight"):
        Planner([schedule], weights, page_bytes=PAGE, placement="split", can_split=False)


def test_a_program_without_linear_weights_plans_as_without_times() -> None:
    weights = matrices(table=300, **dict.fromkeys("abcdef", 64))
    schedule = chain("~table", *"abcdef")
    split, auto = planner([schedule], weights), planner([schedule], weights, "auto")
    assert (split.floor_bytes, split.full_bytes) == (auto.floor_bytes, auto.full_bytes)
    for budget in range(auto.floor_bytes, auto.full_bytes, PAGE):
        assert split.plan(budget).methods[0].warm == auto.plan(budget).methods[0].warm


# ---- prefixes


def shared(rows: dict[str, int], pages: int, times: dict[str, tuple[float, float]] | None = None) -> dict[str, int]:
    """Rows of the prefixes, and of weights held whole."""
    weights = matrices(**rows)
    known = {}
    if times is not None:
        resident_s, direct_s = zip(*times.values(), strict=True)
        schedule = linear(chain(*times), rows)
        known = host_times([schedule], Calibration(Link(1e9), {"forward": resident_s}, {"forward": direct_s}))
    found = allocate_prefixes(list(weights.values()), [], known, FreePages(pages, PAGE, 256))
    taken = sum(-(-nbytes // PAGE) for nbytes in found.prefix_bytes.values())
    held_bytes = sum(-(-weights[name].nbytes // 256) * 256 for name in found.whole)
    assert taken + -(-held_bytes // PAGE) <= pages
    return {name: nbytes // ROW for name, nbytes in found.prefix_bytes.items()} | {
        name: rows[name] for name in found.whole
    }


def test_prefixes_are_multiples_of_128_rows_or_else_of_16() -> None:
    assert PREFIX_GRAIN_ROWS == 128 and SPLIT_ROWS == 16
    # A page has 32 rows.
    assert [shared({"x": 1000}, pages).get("x", 0) for pages in range(10)] == [
        0,
        32,
        64,
        96,
        128,
        128,
        128,
        128,
        256,
        256,
    ]
    assert shared({"x": 1000}, 28) == {"x": 896} and shared({"x": 1000}, 31) == {"x": 896}
    assert shared({"x": 1000}, 32) == {"x": 1000}
    # Fewer rows than two grains of the kernel: there is nothing to split.
    assert shared({"x": 16}, 1) == {"x": 16} and shared({"x": 33}, 1) == {"x": 32}


def test_without_times_all_weights_get_equal_parts() -> None:
    assert shared({"x": 4096, "y": 2048, "z": 1024}, 112) == {"x": 2048, "y": 1024, "z": 512}
    # What rounding leaves goes to the largest first.
    assert shared({"x": 4096, "y": 2048, "z": 1024}, 116) == {"x": 2176, "y": 1024, "z": 512}
    assert shared({"x": 4096, "y": 2048, "z": 1024}, 124) == {"x": 2304, "y": 1152, "z": 512}


def test_with_times_memory_goes_where_it_saves_the_most() -> None:
    rows = {"x": 1024, "y": 1024}
    # In place y takes ten times as long per byte as x.
    assert shared(rows, 32, {"x": (0.0, 1e-3), "y": (0.0, 1e-2)}) == {"y": 1024}
    # But arithmetic hides half of it: the other half is what it gets.
    assert shared(rows, 32, {"x": (0.0, 1e-3), "y": (5e-3, 1e-2)}) == {"x": 512, "y": 512}
    # The last rows of y would be free, and less than a page of them is: so x gets the pages.
    assert shared(rows, 32, {"x": (1e-5, 1e-3), "y": (1e-5, 1.001e-3)}) == {"x": 128, "y": 896}


def test_the_times_of_all_methods_count() -> None:
    weights = matrices(x=1024, y=1024)
    schedules = [linear(chain("x", "y", method=name), weights) for name in ("prefill", "decode")]
    resident_s = {"prefill": (9e-3, 0.0), "decode": (0.0, 0.0)}
    direct_s = {"prefill": (1e-2, 2e-3), "decode": (1e-3, 1e-3)}
    times = host_times(schedules, Calibration(Link(1e9), resident_s, direct_s))["x"]
    weight = SplittableWeight("x", 1024 * ROW, 1024, PAGE, times)
    added_s = [weight.added_s((1 - part) * weight.nbytes) for part in (0, 0.5, 0.9, 1)]
    # Decoding pays for every byte, and prefill for the last tenth.
    assert added_s == pytest.approx([0, 0.5e-3, 0.9e-3, 2e-3])
    # A method that was not timed both ways says nothing, and then the others say too little.
    assert host_times(schedules, Calibration(Link(1e9), resident_s, {"decode": (1e-3, 1e-3)})) == {}
    assert host_times(schedules, None) == {}


def test_a_step_takes_its_part_of_the_time_in_place_and_no_less_than_resident() -> None:
    weights = matrices(x=1024, y=1024)
    schedule = linear(chain("x", "y"), weights)
    plan = planner([schedule], weights).plan(32 * PAGE)
    assert prefixes(plan) == {"x": 512 * ROW, "y": 512 * ROW}
    link = Link(1e9)

    def run_s(x_s: float, y_s: float) -> float:
        timing = simulate(plan.methods[0], schedule, step_s=(1e-3, 1e-3), direct_step_s=(x_s, y_s), link=link)
        return timing.run_s

    assert run_s(8e-3, 8e-3) == pytest.approx(8e-3)
    assert run_s(8e-3, 1.5e-3) == pytest.approx(5e-3)
    with pytest.raises(ValueError, match="reads weights in place, and got the times of 0 such steps; it has 2"):
        simulate(plan.methods[0], schedule, step_s=(1e-3, 1e-3), link=link)


def test_copies_stand_still_for_the_part_in_place() -> None:
    names = "abcdefghijkl"
    weights = matrices(x=4096, **dict.fromkeys(names, 4096))
    schedule = linear(chain("x", *names), ["x"])
    menu = Menu((schedule,), weights, PAGE, split=lambda access: access.linear)
    lowest = MenuPlanner(menu).floor()
    budget = lowest.floor_bytes + 64 * PAGE
    plan = menu.finished(lowest.plan, budget, {})
    check_plan(plan, [schedule], weights, budget_bytes=budget)
    placed, streamed = plan.methods[0].placements[0], plan.methods[0].warm.bytes_streamed
    assert placed.in_place_bytes == 2048 * ROW and streamed > 8 * 4096 * ROW
    steps_s = (1e-7,) * len(schedule.steps)
    timing = simulate(plan.methods[0], schedule, step_s=steps_s, direct_step_s=steps_s, link=Link(1e9))
    crossing_s = (streamed + placed.in_place_bytes) / 1e9
    assert crossing_s * (1 - 1e-9) <= timing.run_s < 1.02 * crossing_s


@pytest.mark.parametrize("timed", [False, True])
def test_many_weights_are_gone_through_a_few_times(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, because times would depend on the machine: how often a prefix grows by what rounding leaves."""
    count = 2_000
    rows = {f"w{index}": 200 + index * 37 % 1000 for index in range(count)}
    times = {name: (rows[name] * 1e-9, rows[name] * 1e-7) for name in rows} if timed else None
    total_pages = sum(rows.values()) * ROW // PAGE
    made_longer: Counter[int] = Counter()
    longer = SplittableWeight.longer

    def counted(weight: SplittableWeight, prefix_bytes: int) -> int:
        made_longer[pages] += 1
        return longer(weight, prefix_bytes)

    monkeypatch.setattr(SplittableWeight, "longer", counted)
    for pages in (total_pages // 10, total_pages // 2, total_pages * 9 // 10):
        assert shared(rows, pages, times)
        assert 0 < made_longer[pages] <= 4 * count


# ---- at random


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Schedule], dict[str, Weight]]:
    names = [f"w{index}" for index in range(draw(st.integers(1, 7)))]
    weights = matrices(**{name: draw(st.integers(0, 400)) for name in names})
    mark = st.sampled_from(["", "", "", "~", "!"])
    step = st.lists(st.builds(str.__add__, mark, st.sampled_from(names)), min_size=1, max_size=2).map(" ".join)
    methods = draw(st.lists(st.lists(step, min_size=1, max_size=8), min_size=1, max_size=2))
    multiplied = draw(st.sets(st.sampled_from(names)))
    return [linear(chain(*steps, method=f"m{index}"), multiplied) for index, steps in enumerate(methods)], weights


@given(
    program=programs(),
    page=st.sampled_from([16, 256, 512, 1024]),
    parts=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    placement=st.sampled_from(["split", "auto"]),
    timed=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_plan_is_safe_and_within_its_budget(
    program: tuple[list[Schedule], dict[str, Weight]], page: int, parts: list[int], placement: str, timed: bool
) -> None:
    schedules, weights = program
    made = Planner(schedules, weights, page_bytes=page, placement=placement)
    floor, full = made.floor_bytes, made.full_bytes
    accesses = [one for schedule in schedules for one in schedule.accesses if weights[one.weight].nbytes]
    if placement == "split" and all(one.linear or one.gathered or one.pinned for one in accesses):
        assert (floor == 0) == (not any(one.pinned for one in accesses))
    calibration = None
    if timed:
        step_s = {one.method: (1e-6,) * len(one.steps) for one in schedules}
        direct_s = {one.method: tuple(1e-5 + 1e-6 * k for k in range(len(one.steps))) for one in schedules}
        calibration = Calibration(Link(1e9, 1e-6), step_s, direct_s)
    for part in parts:
        budget = floor + max(full - floor, 0) * part // 20
        plan = made.plan(budget, calibration)
        check_plan(plan, schedules, weights, budget_bytes=budget)
        for schedule, method in zip(schedules, plan.methods, strict=True):
            for access, placed in zip(schedule.accesses, method.placements, strict=True):
                if placement == "split" and access.linear and not access.pinned:
                    assert placed.stay is None, "what can be split is not copied"
                elif placed.is_direct:
                    assert access.gathered or (placement == "auto" and (timed or budget < made.copying_bytes))
                assert not placed.is_split or placement == "split" or timed or budget < made.copying_bytes
        if budget >= full:
            assert not plan.direct_weights and not plan.split_weights
            assert not any(method.copies for method in plan.methods)
    if floor:
        with pytest.raises(BelowFloorError):
            made.plan(floor - 1)
