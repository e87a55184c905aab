from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BelowFloorError, ScheduleError
from penstock.plan.calibration import Calibration, Link, lower_bound_s
from penstock.plan.check import check_plan
from penstock.plan.floor import floor_bytes
from penstock.plan.plan import NO_RANGE, Plan
from penstock.plan.planner import Planner
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight
from tests.plan.planning import full_bytes, make_plan, placed_floor
from tests.plan.test_floor import chain, llama_3_8b, weights_of

PAGE = 2 * 2**20
LLAMA_BYTES = 16_060_522_496


def streamed_bytes(plan: Plan) -> int:
    return sum(method.warm.bytes_streamed for method in plan.methods)


# ---- by hand


def test_at_the_floor_three_of_six_equal_weights_are_on_the_device_and_all_stream() -> None:
    schedule, weights = chain(*"abcdef"), weights_of(**dict.fromkeys("abcdef", 32))
    floor = placed_floor([schedule], weights, page_bytes=16)
    assert (floor.floor_bytes, floor.resident_bytes, floor.ring_bytes) == (96, 0, 96)
    assert (floor.method, floor.step_index, floor.weights) == ("forward", 0, ("a", "b", "c"))
    (method,) = floor.plan.methods
    assert (method.warm.bytes_streamed, method.warm.copies, method.warm.bytes_hit) == (6 * 32, 6, 0)
    # Each arrives two steps ahead of its own, in the place of the one that was read three steps ahead of it.
    by_weight = {copy.piece.weight: copy for copy in method.copies}
    issues = [(by_weight[name].issue_before, by_weight[name].wait_step) for name in "abcdef"]
    assert issues == [(4, 3), (5, 4), (6, 5), (1, 0), (2, 1), (3, 2)]
    assert [method.copies[index].piece.weight for index in method.prologue] == ["a", "b", "c"]


def test_on_a_short_cycle_fixed_addresses_cost_more_than_the_load() -> None:
    """Of four stays of three steps each, in a cycle of four steps, any two overlap: none can share a page."""
    schedule, weights = chain(*"abcd"), weights_of(**dict.fromkeys("abcd", 32))
    assert floor_bytes([schedule], weights).floor_bytes == 96
    assert placed_floor([schedule], weights, page_bytes=16).floor_bytes == 128


def test_with_everything_resident_nothing_streams_and_weights_share_pages() -> None:
    schedule, weights = chain("a", "b", "c", "d"), weights_of(a=100, b=300, c=4096, d=1)
    full = full_bytes([schedule], weights, page_bytes=4096)
    assert full == 2 * 4096  # 256 + 512 + 4096 + 256
    for budget_bytes in (full, 100 * full):
        plan = make_plan([schedule], weights, budget_bytes=budget_bytes, page_bytes=4096)
        check_plan(plan, [schedule], weights, budget_bytes=full)
        assert plan.device_bytes == plan.resident_bytes == full
        assert streamed_bytes(plan) == 0 and plan.methods[0].warm.bytes_hit == 4497


def test_between_the_two_suffixes_of_equal_length_stream_and_the_rest_is_resident() -> None:
    names = [f"w{index}" for index in range(12)]
    schedule, weights = chain(*names), weights_of(**dict.fromkeys(names, 100))
    plan = make_plan([schedule], weights, budget_bytes=600, page_bytes=1)
    check_plan(plan, [schedule], weights, budget_bytes=600)
    suffixes = [stay.nbytes for stay in plan.methods[0].stays]
    # One of them may be what is left over.
    assert len(suffixes) >= 6 and len({*suffixes} - {min(suffixes)}) <= 1
    # What streams is what is not resident; the ring, about two suffixes, is all the rest of the budget.
    assert 1200 - 600 < sum(suffixes) == 1200 - plan.resident_bytes <= 1200 - 600 + 3 * max(suffixes) + 600 // 32


def test_a_weight_read_twice_in_a_row_is_copied_once() -> None:
    schedule, weights = chain("a", "b", "a", "c", "d", "e", "f"), weights_of(a=9, b=8, c=7, d=6, e=5, f=4)
    plan = placed_floor([schedule], weights, page_bytes=1).plan
    (stay,) = (stay for stay in plan.methods[0].stays if stay.weight == "a")
    assert stay.accesses == (0, 2)
    assert plan.methods[0].warm.bytes_hit == 9 and plan.methods[0].warm.bytes_streamed == 9 + 8 + 7 + 6 + 5 + 4


def test_a_weight_read_on_both_sides_of_the_end_of_a_run_stays_across_it() -> None:
    schedule, weights = chain(*"abcdefghija"), weights_of(**dict.fromkeys("abcdefghij", 9))
    plan = placed_floor([schedule], weights, page_bytes=1).plan
    (stay,) = (stay for stay in plan.methods[0].stays if stay.weight == "a")
    assert stay.accesses == (10, 0) and stay.crosses_end and stay.last_step == 0


def test_a_weight_read_far_apart_is_copied_twice_into_two_ranges_with_one_prefix() -> None:
    names = [f"w{index}" for index in range(10)]
    steps = [*names[:5], "tied", *names[5:], "tied"]
    weights = weights_of(tied=100, **dict.fromkeys(names, 100))
    plan = placed_floor([chain(*steps)], weights, page_bytes=1).plan
    stays = [stay for stay in plan.methods[0].stays if stay.weight == "tied"]
    assert sorted(stay.accesses for stay in stays) == [(5,), (11,)]
    assert len({copy.piece.range_index for copy in plan.methods[0].copies if copy.piece.weight == "tied"}) == 2
    check_plan(plan, [chain(*steps)], weights)


def test_what_streams_twice_a_run_is_made_resident_first() -> None:
    names = [f"w{index}" for index in range(10)]
    schedule = chain(*names[:5], "tied", *names[5:], "tied")
    weights = weights_of(tied=2**20, **dict.fromkeys(names, 2**20))
    plan = make_plan([schedule], weights, budget_bytes=6 * 2**20, page_bytes=4096)
    assert "tied" not in {stay.weight for stay in plan.methods[0].stays}


def test_small_weights_are_resident_where_a_page_each_would_cost_more() -> None:
    steps: list[str] = []
    sizes: dict[str, int] = {}
    for layer in range(20):
        steps += [f"norm{layer}", f"scale{layer}", f"bias{layer}", f"w{layer}"]
        sizes |= {f"norm{layer}": 100, f"scale{layer}": 100, f"bias{layer}": 100, f"w{layer}": 40_000}
    floor = placed_floor([chain(*steps)], weights_of(**sizes), page_bytes=32_768)
    # Two large weights in the ring, as the next copy is always a large one; and a page for all that is small.
    assert floor.resident_bytes == 32_768 and {stay.weight[0] for stay in floor.plan.methods[0].stays} == {"w"}


def test_a_pinned_weight_is_resident_in_every_method() -> None:
    weights = weights_of(p=300, a=10, b=20, c=30, d=40, e=50)
    pinning = Schedule("prefill", (Access(0, "a"), Access(1, "p", pinned=True)), (Step("k0", (0,)), Step("k1", (1,))))
    decode = chain("a", "p", "b", "c", "d", "e", method="decode")
    floor = placed_floor([pinning, decode], weights, page_bytes=1)
    check_plan(floor.plan, [pinning, decode], weights, budget_bytes=floor.floor_bytes)
    assert "p" in {piece.weight for piece in floor.plan.fills if piece.nbytes == 300}
    assert all(placed.stay is None for m in floor.plan.methods for placed in m.placements if placed.weight == "p")


def test_methods_share_prefixes_and_take_turns_with_the_ring() -> None:
    names = [f"w{index}" for index in range(12)]
    weights = weights_of(**dict.fromkeys(names, 4096 * 8))
    schedules = [chain(*names, method="prefill"), chain(*reversed(names), method="decode")]
    budget_bytes = full_bytes(schedules, weights, page_bytes=4096) // 2
    both = make_plan(schedules, weights, budget_bytes=budget_bytes, page_bytes=4096)
    alone = make_plan(schedules[:1], weights, budget_bytes=budget_bytes, page_bytes=4096)
    check_plan(both, schedules, weights, budget_bytes=budget_bytes)
    assert both.resident_bytes == alone.resident_bytes
    assert [method.warm.bytes_streamed for method in both.methods] == [streamed_bytes(alone)] * 2


def test_weights_without_bytes_need_no_memory() -> None:
    plan = make_plan([chain("a", "b")], weights_of(a=0, b=0), budget_bytes=0, page_bytes=4096)
    assert plan.device_bytes == 0 and {placed.range_index for placed in plan.methods[0].placements} == {NO_RANGE}
    beside = make_plan([chain("a", "b")], weights_of(a=0, b=5), budget_bytes=4096, page_bytes=4096)
    assert [placed.range_index for placed in beside.methods[0].placements] == [0, 0]


def test_no_schedule_needs_nothing() -> None:
    assert make_plan([], {}, budget_bytes=0, page_bytes=1).device_bytes == 0
    empty = Schedule("forward", (), ())
    assert placed_floor([empty], {}, page_bytes=1).floor_bytes == 0


@pytest.mark.parametrize("steps", [("a",), ("a", "b"), ("a b", "b c")])
def test_a_program_too_short_to_stream_is_resident(steps: tuple[str, ...]) -> None:
    weights = weights_of(a=5, b=6, c=7)
    floor = placed_floor([chain(*steps)], weights, page_bytes=1)
    check_plan(floor.plan, [chain(*steps)], weights)
    assert floor.floor_bytes == full_bytes([chain(*steps)], weights, page_bytes=1) == floor.plan.resident_bytes


# ---- refusals


def test_one_byte_below_the_floor_is_refused_and_says_what_sets_it() -> None:
    schedule = chain(*"abcdefgh")
    weights = weights_of(**{**dict.fromkeys("abcdefgh", 1000), "c": 5000, "d": 5000, "e": 5000})
    floor = placed_floor([schedule], weights, page_bytes=1000)
    assert floor.floor_bytes == 15_000
    with pytest.raises(BelowFloorError, match="the floor is 15000 bytes") as refusal:
        make_plan([schedule], weights, budget_bytes=14_999, page_bytes=1000)
    assert (refusal.value.budget_bytes, refusal.value.floor_bytes) == (14_999, 15_000)
    message = str(refusal.value)
    assert "14999 bytes" in message and "step 2 of method 'forward'" in message and "'c', 'd', 'e'" in message


def test_below_the_floor_of_what_is_always_held() -> None:
    with pytest.raises(BelowFloorError, match="11 bytes for 2 resident weights"):
        make_plan([chain("a", "b")], weights_of(a=5, b=6), budget_bytes=10, page_bytes=1)


def test_a_schedule_that_breaks_its_own_rules_is_refused() -> None:
    with pytest.raises(ScheduleError, match="is not a weight"):
        make_plan([chain("a")], {}, budget_bytes=10, page_bytes=1)
    with pytest.raises(ValueError, match="granularity_bytes is 0"):
        make_plan([chain("a")], weights_of(a=1), budget_bytes=10, page_bytes=0)


# ---- any schedule, any budget


@st.composite
def programs(draw: st.DrawFn, page_bytes: int) -> tuple[list[Schedule], dict[str, Weight]]:
    names = [f"w{index}" for index in range(draw(st.integers(1, 12)))]
    small = st.integers(0, 9)
    large = st.integers(0, 6 * page_bytes + 2)
    weights = weights_of(**{name: draw(st.one_of(small, large, large)) for name in names})
    methods = draw(st.sampled_from([["forward"], ["forward"], ["prefill", "decode"]]))
    return [draw(_schedules(names, method)) for method in methods], weights


@st.composite
def _schedules(draw: st.DrawFn, names: list[str], method: str) -> Schedule:
    accesses: list[Access] = []
    steps: list[Step] = []
    in_turn = draw(st.booleans())
    for index in range(draw(st.integers(1, 14))):
        # Spans of a few steps, mostly: one that lasts all the time only makes the weight resident.
        earlier = [access.number for access in accesses[-4:]]
        if in_turn:
            fetched = [names[index % len(names)]]
        else:
            fetched = draw(st.lists(st.sampled_from(names), min_size=0 if earlier else 1, max_size=3))
        lent = draw(st.lists(st.sampled_from(earlier), max_size=1)) if earlier else []
        if not fetched and not lent:
            lent = [earlier[-1]]
        # Numbers are labels, not positions.
        new = [
            Access(100 - 2 * (len(accesses) + k), name, draw(st.integers(0, 39)) == 39)
            for k, name in enumerate(fetched)
        ]
        accesses += new
        steps.append(Step(f"k{index}", (*lent, *(access.number for access in new))))
    return Schedule(method, tuple(accesses), tuple(steps))


@settings(max_examples=120, deadline=None)
@given(data=st.data(), page_bytes=st.sampled_from([1, 16, 4096]))
def test_every_budget_from_the_floor_up_gets_a_safe_plan_within_it(data: st.DataObject, page_bytes: int) -> None:
    schedules, weights = data.draw(programs(page_bytes))
    floor = placed_floor(schedules, weights, page_bytes=page_bytes)
    full = full_bytes(schedules, weights, page_bytes=page_bytes)
    assert floor.plan.device_bytes == floor.floor_bytes <= full
    check_plan(floor.plan, schedules, weights, budget_bytes=floor.floor_bytes)
    if floor.floor_bytes:
        with pytest.raises(BelowFloorError) as refusal:
            make_plan(schedules, weights, budget_bytes=floor.floor_bytes - 1, page_bytes=page_bytes)
        assert refusal.value.floor_bytes == floor.floor_bytes
    between = data.draw(st.lists(st.integers(floor.floor_bytes, full), max_size=3))
    for budget_bytes in (floor.floor_bytes, *between, full):
        plan = make_plan(schedules, weights, budget_bytes=budget_bytes, page_bytes=page_bytes)
        check_plan(plan, schedules, weights, budget_bytes=budget_bytes)
        assert plan == make_plan(schedules, weights, budget_bytes=budget_bytes, page_bytes=page_bytes)
    assert streamed_bytes(plan) == 0 and plan.device_bytes == full


def test_on_most_chains_the_floor_is_the_formulas() -> None:
    """The cycle seldom costs a page; and where it does, often because no placement at all needs less."""
    draw = random.Random(5)
    above: list[float] = []
    for _ in range(100):
        sizes = [draw.randint(1, 60) * 4096 for _ in range(draw.randint(8, 60))]
        weights = weights_of(**{f"w{index}": size for index, size in enumerate(sizes)})
        formula = floor_bytes([chain(*weights)], weights, granularity_bytes=4096).floor_bytes
        above.append(placed_floor([chain(*weights)], weights, page_bytes=4096).floor_bytes / formula)
    assert sorted(above)[90] == 1.0 and max(above) <= 4 / 3


@pytest.mark.parametrize("count", [6, 9, 30, 90])
def test_equal_weights_in_threes_need_exactly_three(count: int) -> None:
    weights = weights_of(**{f"w{index}": 5 * 4096 for index in range(count)})
    assert placed_floor([chain(*weights)], weights, page_bytes=4096).floor_bytes == 3 * 5 * 4096


# ---- real shapes


@pytest.mark.parametrize("fused_norms", [False, True])
def test_llama_3_8b_floor(fused_norms: bool) -> None:
    schedule, weights = llama_3_8b(fused_norms=fused_norms)
    floor = placed_floor([schedule], weights, page_bytes=PAGE)
    assert floor.floor_bytes <= 2.23e9
    # Tight: nothing is lost to pages or to the cycle.
    norms = frozenset(name for name in weights if name.endswith("norm"))
    formulas = [
        floor_bytes([schedule], weights, granularity_bytes=PAGE, resident=resident).floor_bytes
        for resident in (frozenset[str](), norms)
    ]
    assert floor.floor_bytes == min(formulas)
    check_plan(floor.plan, [schedule], weights, budget_bytes=floor.floor_bytes)
    assert floor.plan.methods[0].warm.bytes_streamed == LLAMA_BYTES - sum(piece.nbytes for piece in floor.plan.fills)


def tied_llama(method: str, *, fused_norms: bool) -> tuple[Schedule, dict[str, Weight]]:
    schedule, weights = llama_3_8b(fused_norms=fused_norms)
    accesses = tuple(
        dataclasses.replace(access, weight="embedding") if access.weight == "lm_head" else access
        for access in schedule.accesses
    )
    return Schedule(method, accesses, schedule.steps), weights


def test_llama_3_8b_streams_little_more_than_what_does_not_fit() -> None:
    schedule, weights = llama_3_8b(fused_norms=True)
    full = full_bytes([schedule], weights, page_bytes=PAGE)
    for percent in (15, 30, 50, 75, 90, 95, 99):
        budget_bytes = full * percent // 100
        plan = make_plan([schedule], weights, budget_bytes=budget_bytes, page_bytes=PAGE)
        check_plan(plan, [schedule], weights, budget_bytes=budget_bytes)
        assert full - budget_bytes <= streamed_bytes(plan) + PAGE <= (full - budget_bytes) * 1.06 + 64 * 2**20
        assert plan.ring_bytes <= 0.18 * (full - budget_bytes) + 64 * 2**20
        # Two copies per stay where the pages of two others are taken over, seldom more.
        assert plan.methods[0].warm.copies <= 2.1 * len(plan.methods[0].stays) <= 2.1 * 291


def test_a_larger_budget_never_streams_more() -> None:
    one = llama_3_8b(fused_norms=True)
    tied = tied_llama("prefill", fused_norms=False), tied_llama("decode", fused_norms=True)
    for schedules, weights in (([one[0]], one[1]), ([tied[0][0], tied[1][0]], tied[0][1])):
        floor = placed_floor(schedules, weights, page_bytes=PAGE).floor_bytes
        full = full_bytes(schedules, weights, page_bytes=PAGE)
        streamed = [
            streamed_bytes(make_plan(schedules, weights, budget_bytes=floor + (full - floor) * k // 8, page_bytes=PAGE))
            for k in range(9)
        ]
        assert streamed == sorted(streamed, reverse=True) and streamed[-1] == 0


def test_what_is_left_of_the_budget_lets_copies_run_ahead() -> None:
    """At the floor a copy is issued two steps ahead, three accesses where a norm is fused in."""
    schedule, weights = llama_3_8b(fused_norms=True)
    budget_bytes = full_bytes([schedule], weights, page_bytes=PAGE) * 9 // 10
    (method,) = make_plan([schedule], weights, budget_bytes=budget_bytes, page_bytes=PAGE).methods
    count = len(schedule.accesses)

    lead = sorted((method.stays[copy.stay].accesses[0] - copy.issue_before) % count for copy in method.copies)
    assert lead[len(lead) // 2] >= 5 and lead[-1] <= count // 2 + 2


def test_ten_thousand_accesses() -> None:
    names = [f"w{index}" for index in range(2_500)]
    weights = weights_of(**{name: (8192, 6 << 20, 1 << 20, 20 << 20)[index % 4] for index, name in enumerate(names)})
    schedule = chain(*names, *names, *reversed(names), *names)
    full = full_bytes([schedule], weights, page_bytes=PAGE)
    plan = make_plan([schedule], weights, budget_bytes=full // 3, page_bytes=PAGE)
    check_plan(plan, [schedule], weights, budget_bytes=full // 3)
    assert 0 < streamed_bytes(plan) < 4 * full


# ---- with times


@pytest.mark.parametrize("s_per_byte", [1 / 3e12, 1 / 4e11])
def test_with_times_the_plan_is_the_fastest_of_those_with_more_and_more_room_ahead(s_per_byte: float) -> None:
    """One token (kernels are short beside copies), and many (they are nearly as long)."""
    schedule, weights = llama_3_8b(fused_norms=True)
    planner = Planner([schedule], weights, page_bytes=PAGE)
    link = Link(55e9, 3e-6)
    # The embedding is gathered from, and the head computes one token however many there are.
    slow = {name: weight.nbytes for name, weight in weights.items() if name not in ("embedding", "lm_head")}
    times = tuple(
        5e-6 + s_per_byte * sum(slow.get(schedule.access_by_number[number].weight, 0) for number in step.accesses)
        for step in schedule.steps
    )
    calibration = Calibration(link, {"forward": times})
    for percent in (15, 50, 75, 90):
        budget_bytes = planner.full_bytes * percent // 100
        plan = planner.plan(budget_bytes, calibration)
        check_plan(plan, [schedule], weights, budget_bytes=budget_bytes)
        seconds = planner.predicted_s(plan, calibration)
        assert seconds <= planner.predicted_s(planner.plan(budget_bytes), calibration) * 1.001
        bound_s = lower_bound_s(
            weight_bytes=planner.full_bytes,
            budget_bytes=budget_bytes,
            resident_s=calibration.resident_s("forward"),
            link_bytes_per_s=link.bytes_per_s,
        )
        assert bound_s * 0.999 <= seconds <= bound_s * 1.05
