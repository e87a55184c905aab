from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.calibration import Link, fit_link, lower_bound_s
from penstock.plan.plan import Copy, MethodPlan, Piece, Placement, Slots, Stay
from penstock.plan.simulator import Span, Timing, simulate
from penstock.schedule import Schedule, Step
from tests.plan.planning import full_bytes, make_plan
from tests.plan.test_floor import PAGE, chain, llama_3_8b

# A copy of 100 bytes takes ten seconds.
LINK = Link(bytes_per_s=10)


def by_hand(
    steps: Sequence[str],
    stays: Sequence[tuple[int, ...]],
    copies: Sequence[tuple[int, int, int, int | None]],
) -> tuple[MethodPlan, Schedule]:
    """Stays by the positions that read them, copies as (stay, nbytes, issue_before, wait_step)."""
    schedule = chain(*steps)
    stay_of = {position: index for index, positions in enumerate(stays) for position in positions}
    copied = [0] * len(stays)
    records: list[Copy] = []
    for stay, nbytes, issue_before, wait_step in copies:
        weight = schedule.accesses[stays[stay][0]].weight
        records.append(Copy(stay, Piece(weight, copied[stay], nbytes, stay, copied[stay]), issue_before, wait_step))
        copied[stay] += nbytes
    placements = [
        Placement(access.number, access.weight, 100, stay_of.get(position, len(stays)), 0, stay_of.get(position))
        for position, access in enumerate(schedule.accesses)
    ]
    plan = MethodPlan(
        method=schedule.method,
        placements=tuple(placements),
        stays=tuple(
            Stay(schedule.accesses[positions[0]].weight, nbytes, positions, positions[-1])
            for positions, nbytes in zip(stays, copied, strict=True)
        ),
        copies=tuple(records),
        step_count=len(schedule.steps),
    )
    return plan, schedule


def ring(slots: Sequence[int | None], nbytes: Sequence[int], late: Sequence[int] = ()) -> tuple[MethodPlan, Schedule]:
    """A chain in which access p goes to slots[p] of the ring (None: resident), as soon as its last reader is through.

    Where late[p] is not zero the access has two copies, the second of them issued so many positions later.
    """
    count = len(slots)
    stays: list[tuple[int, ...]] = []
    copies: list[tuple[int, int, int, int | None]] = []
    for position, slot in enumerate(slots):
        if slot is None:
            continue
        # What was in the slot before: at the latest, the access itself a run ago.
        before = next(k for k in range(position - 1, position - count - 1, -1) if slots[k % count] == slot)
        halves = [(nbytes[position], 0)]
        if late and late[position]:
            halves = [(nbytes[position] // 2, 0), (nbytes[position] - nbytes[position] // 2, late[position])]
        for half, delay in halves:
            issue = min(before + 1 + delay, position)
            # The end of the run before is not the beginning of this one.
            issue_before = issue if before >= 0 or issue > 0 else issue + count
            copies.append((len(stays), half, issue_before, before % count))
        stays.append((position,))
    # As the planner does: of copies issued together, what is read in this run comes first.
    copies.sort(key=lambda copy: (copy[2], stays[copy[0]][0] + count * (stays[copy[0]][0] < copy[2])))
    return by_hand([f"w{position}" for position in range(count)], stays, copies)


# ---- by hand


def test_all_resident_takes_what_its_steps_take() -> None:
    timing = simulate(*by_hand("abc", [], []), step_s=[1, 2, 3], link=LINK, rest_s=0.5)
    assert timing == Timing(run_s=6.5, cold_run_s=6.5, stall_s=0, link_busy_s=0, bytes_streamed=0, settled=True)


def test_a_ring_of_three_keeps_the_link_busy() -> None:
    plan, schedule = ring([0, 1, 2, 0, 1, 2], [100] * 6)
    assert [(copy.issue_before, copy.wait_step) for copy in plan.copies] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
        (5, 4),
        (6, 5),
    ]
    timing = simulate(plan, schedule, step_s=[1] * 6, link=LINK)
    # Cold, the link begins at once and never rests; only the last step comes after all six copies.
    assert timing == Timing(run_s=60, cold_run_s=61, stall_s=54, link_busy_s=60, bytes_streamed=600, settled=True)
    assert timing.link_busy_s == timing.run_s


def test_every_copy_costs_its_latency() -> None:
    timing = simulate(*ring([0, 1, 2, 0, 1, 2], [100] * 6), step_s=[1] * 6, link=Link(10, copy_latency_s=2))
    assert (timing.run_s, timing.link_busy_s) == (72, 72)


def test_where_steps_are_slower_copies_hide_behind_them() -> None:
    timing = simulate(*ring([0, 1, 2, 0, 1, 2], [100] * 6), step_s=[20] * 6, link=LINK)
    assert (timing.run_s, timing.cold_run_s, timing.stall_s) == (120, 130, 0)
    assert timing.link_busy_s == timing.run_s / 2


def test_with_one_place_nothing_overlaps() -> None:
    timing = simulate(*ring([0] * 6, [100] * 6), step_s=[1] * 6, link=LINK)
    assert (timing.run_s, timing.stall_s) == (66, 60)


def packed(plan: MethodPlan, packed_bytes: int) -> MethodPlan:
    return dataclasses.replace(
        plan, copies=tuple(dataclasses.replace(copy, packed_bytes=packed_bytes) for copy in plan.copies)
    )


@pytest.mark.parametrize(
    ("slots", "run_s"),
    [
        # The slot is free only when it is decoded: six seconds of the link, beside the step, and two of decoding.
        (Slots(1, 60, 0), 24),
        # One is filled while the other waits for the step to end: what is left is decoding and steps.
        (Slots(2, 60, 0), 21),
        # The same in two parts each.
        (Slots(4, 30, 0), 21),
    ],
)
def test_packed_weights_are_on_their_way_while_pages_are_read(slots: Slots, run_s: float) -> None:
    """One place in the ring; three weights of six seconds on the link and two of decoding."""
    plan, schedule = ring([0] * 3, [100] * 3)
    timing = simulate(packed(plan, 60), schedule, step_s=[5] * 3, link=LINK, slots=slots, decoded_bytes_per_s=50)
    assert (timing.run_s, timing.link_busy_s, timing.settled) == (run_s, 18, True)


def test_a_link_that_is_slower_than_decoding_and_steps_never_rests() -> None:
    plan, schedule = ring([0, 1, 0, 1], [100] * 4)
    timing = simulate(
        packed(plan, 60), schedule, step_s=[1] * 4, link=LINK, slots=Slots(2, 60, 0), decoded_bytes_per_s=50
    )
    assert (timing.run_s, timing.link_busy_s) == (24, 24)


def test_what_stays_packed_takes_decoding_alone() -> None:
    plan, schedule = ring([0] * 3, [100] * 3)
    timing = simulate(packed(plan, 0), schedule, step_s=[5] * 3, link=LINK, decoded_bytes_per_s=50)
    assert (timing.run_s, timing.link_busy_s) == (21, 0)


@pytest.mark.parametrize(
    ("places", "step_s", "run_s"),
    [
        # Nothing overlaps, so nothing is shared.
        ([0, 0, 0], 5, 21),
        # The next weight is decoded beside the step, which takes its five seconds and those two.
        ([0, 1, 0, 1], 5, 28),
        # Nor is decoding for nothing where steps are shorter than it.
        ([0, 1, 0, 1], 1, 12),
    ],
)
def test_of_steps_timed_alone_decoding_beside_them_is_added(places: list[int], step_s: int, run_s: float) -> None:
    plan, schedule = ring(places, [100] * len(places))
    steps = [step_s] * len(places)

    def timing(steps_alone: bool) -> Timing:
        return simulate(
            packed(plan, 0), schedule, step_s=steps, link=LINK, decoded_bytes_per_s=50, steps_alone=steps_alone
        )

    assert timing(True).run_s == pytest.approx(run_s)
    assert timing(False).run_s <= timing(True).run_s


def test_what_goes_over_the_link_is_decoded_on_the_device_too() -> None:
    """Slots are filled beside steps that hide the link; what is decoded, two seconds of each weight, is added."""
    plan, schedule = ring([0, 1, 0, 1], [100] * 4)
    timing = simulate(
        packed(plan, 60),
        schedule,
        step_s=[8] * 4,
        link=LINK,
        slots=Slots(2, 60, 0),
        decoded_bytes_per_s=50,
        steps_alone=True,
    )
    assert timing.run_s == pytest.approx(4 * (8 + 2))


def test_packed_copies_need_slots() -> None:
    plan, schedule = ring([0] * 3, [100] * 3)
    with pytest.raises(ValueError, match="copies 'w1' packed, and there are no slots"):
        simulate(packed(plan, 60), schedule, step_s=[1] * 3, link=LINK)


@pytest.mark.parametrize(("slots", "run_s"), [((0, 1, 0, 1), 120), ((0, 1, 2, 3), 80)])
def test_large_and_small_in_turn_need_more_than_two_places(slots: tuple[int, ...], run_s: float) -> None:
    """Copies of 30, 10, 30, 10 and steps as long: in two places, the large copy waits for the large step."""
    timing = simulate(*ring(slots, [300, 100, 300, 100]), step_s=[30, 10, 30, 10], link=LINK)
    assert (timing.run_s, timing.stall_s) == (run_s, run_s - 80)


def test_two_places_are_enough_where_the_small_copy_has_the_large_step() -> None:
    timing = simulate(*ring((0, 1, 0, 1), [300, 100, 300, 100]), step_s=[10, 30, 10, 30], link=LINK)
    assert (timing.run_s, timing.cold_run_s, timing.stall_s) == (80, 110, 0)


def test_a_copy_issued_ahead_of_its_wait_step_waits_for_the_run_before() -> None:
    # Issued at the very beginning, into the place that step 2 of the last run read. Cold, there was none.
    timing = simulate(*by_hand("abc", [(2,)], [(0, 100, 0, 2)]), step_s=[1, 1, 1], link=LINK)
    assert (timing.run_s, timing.cold_run_s, timing.stall_s) == (11, 11, 8)


@pytest.mark.parametrize(("issue_before", "run_s"), [(1, 10), (2, 14)])
def test_a_copy_waits_for_this_run_only_if_the_step_is_passed(issue_before: int, run_s: float) -> None:
    # Before access 1 is fetched, step 1 has not been launched: what the copy waits for is its end a run ago.
    plan, schedule = by_hand("abcd", [(3,)], [(0, 100, issue_before, 1)])
    assert simulate(plan, schedule, step_s=[1, 2, 1, 1], link=LINK).run_s == run_s


def test_what_is_read_on_both_sides_of_the_end_is_copied_twice_when_cold() -> None:
    spans: list[Span] = []
    plan, schedule = by_hand("aba", [(2, 0)], [(0, 100, 1, 0)])
    timing = simulate(plan, schedule, step_s=[1, 1, 1], link=LINK, spans=spans)
    assert (timing.run_s, timing.cold_run_s, timing.stall_s, timing.bytes_streamed) == (12, 22, 9, 100)
    first = [(span.lane, span.index, span.begin_s, span.end_s) for span in spans if span.run == 0]
    assert first == [
        ("copy", 0, 0, 10),
        ("compute", 0, 10, 11),
        ("copy", 0, 11, 21),
        ("compute", 1, 11, 12),
        ("compute", 2, 21, 22),
    ]


def test_a_step_waits_for_all_copies_of_a_stay() -> None:
    plan, schedule = by_hand("abc", [(2,)], [(0, 40, 0, 2), (0, 60, 1, 0)])
    timing = simulate(plan, schedule, step_s=[1, 1, 1], link=LINK)
    assert (timing.run_s, timing.cold_run_s) == (11, 11)


def test_copies_of_the_next_run_come_in_while_this_one_ends() -> None:
    # The place of the first access is free after step 0; the steps after it hide all of the copy, or a part.
    plan, schedule = by_hand("abc", [(0,)], [(0, 100, 1, 0)])
    assert simulate(plan, schedule, step_s=[1, 6, 6], link=LINK).run_s == 13
    assert simulate(plan, schedule, step_s=[1, 3, 3], link=LINK).run_s == 11
    assert simulate(plan, schedule, step_s=[1, 3, 3], link=LINK, rest_s=9).run_s == 16


def test_a_step_that_fetches_nothing_follows_the_step_before() -> None:
    plan, schedule = by_hand("abc", [(2,)], [(0, 100, 0, 3)])
    # Step 1 reads what step 0 was lent; the stay is fetched for step 3 alone.
    steps = (Step("k0", (0,)), Step("k1", (0,)), Step("k2", (1,)), Step("k3", (0, 2)))
    schedule, plan = dataclasses.replace(schedule, steps=steps), dataclasses.replace(plan, step_count=4)
    spans: list[Span] = []
    timing = simulate(plan, schedule, step_s=[1, 2, 3, 4], link=LINK, spans=spans)
    assert (timing.run_s, timing.stall_s) == (14, 4)
    begins = [span.begin_s for span in spans if span.lane == "compute" and span.run == 0]
    assert begins == [0, 1, 3, 10]


def test_ten_thousand_accesses() -> None:
    # Of every four weights one is resident, and the ring has seven places.
    slots = [None if position % 4 == 3 else position % 7 for position in range(10_000)]
    plan, schedule = ring(slots, [100 + position % 13 for position in range(10_000)])
    timing = simulate(plan, schedule, step_s=[1] * 10_000, link=LINK)
    assert timing.settled and timing.bytes_streamed == sum(copy.piece.nbytes for copy in plan.copies) > 750_000
    assert timing.run_s == pytest.approx(timing.bytes_streamed / LINK.bytes_per_s, rel=1e-6)


# ---- when it has come to repeat itself


def test_runs_of_one_length_are_not_yet_a_steady_state() -> None:
    """The first runs last 70 s, for as long as the link has not caught up; then it sets the pace."""
    timing = simulate(*ring([0, 1, 2], [300, 50, 300], [2, 0, 0]), step_s=[30, 10, 2], link=LINK, rest_s=3)
    assert (timing.run_s, timing.link_busy_s, timing.settled) == (65, 65, True)


def test_before_it_repeats_itself_the_slower_stream_tells_the_time() -> None:
    # The host, slow at first, gives the link a lead, on which the compute stream lives for a few runs.
    plan, schedule = ring([None, 1, 0, None, 2], [20, 10, 100, 10, 100])
    for runs, settled in ((2, False), (32, True)):
        timing = simulate(plan, schedule, step_s=[5, 0, 0, 10, 2], link=LINK, host_s_per_access=4, runs=runs)
        assert (timing.run_s, timing.settled) == (21, settled)


# ---- the host, and where runs meet


def test_copies_and_steps_wait_for_the_host_to_get_there() -> None:
    spans: list[Span] = []
    plan, schedule = by_hand("abc", [(2,)], [(0, 100, 1, None)])
    timing = simulate(
        plan, schedule, step_s=[1, 1, 1], link=LINK, host_s_per_access=2, boundary="synchronised", spans=spans
    )
    first = [(span.lane, span.begin_s) for span in spans if span.run == 0]
    assert first == [("compute", 2), ("copy", 2), ("compute", 4), ("compute", 12)]
    # Of the seven seconds between the last two steps, one is the host's.
    assert (timing.run_s, timing.stall_s, timing.settled) == (13, 6, True)


def test_a_host_slower_than_the_device_sets_the_pace() -> None:
    plan, schedule = by_hand("abc", [], [])
    slow = simulate(plan, schedule, step_s=[1, 1, 1], link=LINK, host_s_per_access=2)
    assert (slow.run_s, slow.cold_run_s, slow.settled) == (6, 7, True)
    fast = simulate(plan, schedule, step_s=[1, 1, 1], link=LINK, host_s_per_access=0.5)
    assert (fast.run_s, fast.cold_run_s, fast.settled) == (3, 3.5, True)


def test_a_host_that_loses_its_lead_slowly_sets_the_pace_in_the_end() -> None:
    # After the cold run the host is a second ahead of the second step, and loses half of one a run.
    plan, schedule = by_hand("abc", [(0,)], [(0, 100, 1, 0)])
    timing = simulate(plan, schedule, step_s=[0.5, 12, 0.5], link=LINK, host_s_per_access=4.5)
    assert (timing.run_s, timing.settled) == (13.5, True)
    few = simulate(plan, schedule, step_s=[0.5, 12, 0.5], link=LINK, host_s_per_access=4.5, runs=4)
    assert (few.run_s, few.settled) == (13.5, False)


def test_a_host_may_come_to_set_the_pace_only_after_the_cold_run() -> None:
    timing = simulate(*ring([0, None, None], [100] * 3), step_s=[10, 5, 1], link=LINK, rest_s=3, host_s_per_access=7)
    assert (timing.run_s, timing.settled) == (21, True)


def test_a_host_that_waits_for_every_run_issues_later() -> None:
    plan, schedule = by_hand("abc", [(2,)], [(0, 100, 0, 2)])
    assert simulate(plan, schedule, step_s=[1, 1, 1], link=LINK, rest_s=5).run_s == 11
    timing = simulate(plan, schedule, step_s=[1, 1, 1], link=LINK, rest_s=5, boundary="synchronised")
    assert (timing.run_s, timing.settled) == (16, True)


# ---- refusals


def test_what_does_not_belong_together_is_refused() -> None:
    plan, schedule = ring([0, 1, 2], [100] * 3)
    with pytest.raises(ValueError, match="got the times of 2 steps; the plan has 3"):
        simulate(plan, schedule, step_s=[1, 1], link=LINK)
    with pytest.raises(ValueError, match="not of this schedule, which is of method 'decode'"):
        simulate(plan, chain(*"abc", method="decode"), step_s=[1] * 3, link=LINK)
    with pytest.raises(ValueError, match=r"access 2 \('w2'\) reads a stay without a copy"):
        simulate(dataclasses.replace(plan, copies=plan.copies[:-1]), schedule, step_s=[1] * 3, link=LINK)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(wrong: float) -> None:
    plan, schedule = ring([0, 1, 2], [100] * 3)
    with pytest.raises(ValueError, match=r"step_s\[1\] is"):
        simulate(plan, schedule, step_s=[1, wrong, 1], link=LINK)
    with pytest.raises(ValueError, match="rest_s is"):
        simulate(plan, schedule, step_s=[1] * 3, link=LINK, rest_s=wrong)
    with pytest.raises(ValueError, match="host_s_per_access is"):
        simulate(plan, schedule, step_s=[1] * 3, link=LINK, host_s_per_access=wrong)
    with pytest.raises(ValueError, match="bytes_per_s is"):
        Link(wrong)
    with pytest.raises(ValueError, match="copy_latency_s is"):
        Link(1.0, wrong)


def test_one_run_has_no_steady_state() -> None:
    with pytest.raises(ValueError, match="1 runs to simulate"):
        simulate(*ring([0, 1, 2], [100] * 3), step_s=[1] * 3, link=LINK, runs=1)


# ---- any plan


@dataclasses.dataclass(frozen=True)
class Case:
    plan: MethodPlan
    schedule: Schedule
    step_s: tuple[float, ...]
    rest_s: float

    def timing(self, link: Link, scale: float = 1.0, spans: list[Span] | None = None) -> Timing:
        steps = [took_s * scale for took_s in self.step_s]
        return simulate(
            self.plan, self.schedule, step_s=steps, link=link, rest_s=self.rest_s * scale, runs=200, spans=spans
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 12))
    slots = draw(st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=count, max_size=count))
    nbytes = draw(st.lists(st.integers(2, 1000), min_size=count, max_size=count))
    late = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    step_s = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    return Case(*ring(slots, nbytes, late), tuple(map(float, step_s)), float(draw(st.integers(0, 20))))


links = st.builds(Link, st.sampled_from([1.0, 7.0, 30.0, 1000.0]), st.sampled_from([0.0, 0.0, 3.0]))


@settings(max_examples=200, deadline=None)
@given(case=cases(), link=links)
def test_no_plan_is_faster_than_its_parts_nor_slower_than_their_sum(case: Case, link: Link) -> None:
    timing = case.timing(link)
    assert timing.settled and timing.bytes_streamed == sum(copy.piece.nbytes for copy in case.plan.copies)
    computing_s = sum(case.step_s) + case.rest_s
    copying_s = timing.bytes_streamed / link.bytes_per_s + link.copy_latency_s * len(case.plan.copies)
    assert timing.link_busy_s == pytest.approx(copying_s)
    assert max(computing_s, copying_s) * (1 - 1e-9) <= timing.run_s <= (computing_s + copying_s) * (1 + 1e-9)
    assert timing.run_s == pytest.approx(computing_s + timing.stall_s)
    assert 0 <= timing.link_busy_s <= timing.run_s * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(case=cases(), link=links, more=st.sampled_from([1.01, 2.0, 50.0]))
def test_a_faster_link_is_never_slower(case: Case, link: Link, more: float) -> None:
    slower, faster = case.timing(link), case.timing(Link(link.bytes_per_s * more, link.copy_latency_s))
    assert faster.run_s <= slower.run_s * (1 + 1e-9) and faster.cold_run_s <= slower.cold_run_s * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(case=cases(), link=links, scale=st.sampled_from([1e-6, 0.3, 1e4]))
def test_in_other_units_the_times_are_the_same(case: Case, link: Link, scale: float) -> None:
    timing = case.timing(link)
    scaled = case.timing(Link(link.bytes_per_s / scale, link.copy_latency_s * scale), scale)
    for name in ("run_s", "cold_run_s", "stall_s", "link_busy_s"):
        assert getattr(scaled, name) == pytest.approx(getattr(timing, name) * scale, abs=1e-6 * scale)


@settings(max_examples=200, deadline=None)
@given(case=cases(), link=links)
def test_everything_begins_when_the_last_thing_it_waits_for_has_ended(case: Case, link: Link) -> None:
    """Told from the spans alone: in which run a copy was made, and a step was passed, follows from the records."""
    spans: list[Span] = []
    case.timing(link, spans=spans)
    prologue = len(case.plan.prologue)
    copied = [span for span in spans if span.lane == "copy"]
    # The copies that a cold run makes first are those that the run before would have made.
    ends = {("copy", -1 if order < prologue else span.run, span.index): span.end_s for order, span in enumerate(copied)}
    ends |= {(span.lane, span.run, span.index): span.end_s for span in spans if span.lane == "compute"}
    assert [span.index for span in copied[:prologue]] == list(case.plan.prologue)
    for order, span in enumerate(copied):
        copy = case.plan.copies[span.index]
        waits = [copied[order - 1].end_s if order else 0.0]
        if order >= prologue and copy.wait_step is not None:
            # A chain: the access at a position is read by the step of the same number.
            run = span.run - (copy.wait_step >= copy.issue_before)
            waits.append(ends.get(("compute", run, copy.wait_step), 0.0))
        assert span.begin_s == max(waits)
        assert span.end_s - span.begin_s == pytest.approx(link.copy_s(copy.piece.nbytes))
    last = len(case.step_s) - 1
    for span in (span for span in spans if span.lane == "compute"):
        if span.index:
            waits = [ends["compute", span.run, span.index - 1]]
        else:
            waits = [ends["compute", span.run - 1, last] + case.rest_s if span.run else 0.0]
        stay = case.plan.placements[span.index].stay
        for index, copy in enumerate(case.plan.copies):
            if copy.stay == stay:
                waits.append(ends["copy", span.run - (copy.issue_before > span.index), index])
        assert span.begin_s == max(waits)


# ---- the planner's plans

H200 = Link(55.4e9, copy_latency_s=2.8e-6)


def llama_runs(percents: Sequence[int], bytes_read_per_s: float) -> list[tuple[Timing, float, float]]:
    """By budget: the timing, the time of the steps alone and the bound. A step is as long as its weights are large."""
    schedule, weights = llama_3_8b(fused_norms=True)
    weight_of = {access.number: weights[access.weight] for access in schedule.accesses}
    step_s = [3e-6 + sum(weight_of[n].nbytes for n in step.accesses) / bytes_read_per_s for step in schedule.steps]
    # An embedding is looked up, not read.
    step_s[0] = 20e-6
    weight_bytes = sum(weight.nbytes for weight in weights.values())
    full = full_bytes([schedule], weights, page_bytes=PAGE)
    runs: list[tuple[Timing, float, float]] = []
    for percent in percents:
        budget_bytes = full * percent // 100
        plan = make_plan([schedule], weights, budget_bytes=budget_bytes, page_bytes=PAGE)
        bound_s = lower_bound_s(
            weight_bytes=weight_bytes,
            budget_bytes=budget_bytes,
            resident_s=sum(step_s),
            link_bytes_per_s=H200.bytes_per_s,
        )
        runs.append((simulate(plan.methods[0], schedule, step_s=step_s, link=H200), sum(step_s), bound_s))
    return runs


def test_one_token_of_llama_3_8b_takes_as_long_as_its_bytes_on_the_link() -> None:
    times: list[float] = []
    for timing, _, bound_s in llama_runs((15, 25, 50, 75, 90), bytes_read_per_s=3.2e12):
        streamed_s = timing.bytes_streamed / H200.bytes_per_s
        assert timing.settled and bound_s <= streamed_s < timing.link_busy_s <= timing.run_s * (1 + 1e-9)
        assert timing.run_s <= 1.02 * streamed_s and timing.link_busy_s > 0.99 * timing.run_s
        assert timing.cold_run_s >= timing.run_s * (1 - 1e-9)
        times.append(timing.run_s)
    assert times == sorted(times, reverse=True)


def test_two_thousand_tokens_take_as_long_as_their_steps_where_little_streams() -> None:
    for timing, computing_s, bound_s in llama_runs((95, 99, 100), bytes_read_per_s=0.33e12):
        assert timing.settled and bound_s == computing_s <= timing.run_s * (1 + 1e-9) <= 1.002 * computing_s
        assert timing.stall_s <= 0.002 * computing_s
    assert timing.bytes_streamed == 0 and timing.run_s == pytest.approx(computing_s)


# ---- the link


def test_two_copies_make_a_link_exactly() -> None:
    link = fit_link([(100, 12.0), (300, 32.0)])
    assert link.bytes_per_s == pytest.approx(10) and link.copy_latency_s == pytest.approx(2)


def test_a_link_is_fitted_to_copies_of_all_sizes() -> None:
    """As measured on an H200."""
    measured = {64 << 10: 17e9, 256 << 10: 36e9, 1 << 20: 48e9, 16 << 20: 55.4e9, 256 << 20: 55.4e9}
    link = fit_link([(nbytes, nbytes / bytes_per_s) for nbytes, bytes_per_s in measured.items()])
    assert link.bytes_per_s == pytest.approx(55.4e9, rel=0.02) and 2e-6 < link.copy_latency_s < 4e-6
    for nbytes, bytes_per_s in measured.items():
        assert link.copy_s(nbytes) == pytest.approx(nbytes / bytes_per_s, rel=0.04)


def test_a_fit_never_has_a_negative_latency() -> None:
    # A straight line through both would take less than no time for no bytes.
    link = fit_link([(100, 9.0), (200, 20.0)])
    assert link.copy_latency_s == 0 and 10 < link.bytes_per_s < 100 / 9


def test_what_is_no_measurement_of_a_link_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least two sizes, got \[100\]"):
        fit_link([(100, 1.0), (100, 1.1)])
    with pytest.raises(ValueError, match="do not take longer the larger they are"):
        fit_link([(100, 2.0), (200, 1.0)])
    with pytest.raises(ValueError, match="a copy of 200 bytes in 0 s"):
        fit_link([(100, 2.0), (200, 0)])


# ---- the bound


def test_the_bound_is_the_slower_of_computing_and_copying() -> None:
    assert lower_bound_s(weight_bytes=700, budget_bytes=100, resident_s=5, link_bytes_per_s=10) == 60
    assert lower_bound_s(weight_bytes=700, budget_bytes=100, resident_s=90, link_bytes_per_s=10) == 90
    assert lower_bound_s(weight_bytes=700, budget_bytes=800, resident_s=5, link_bytes_per_s=10) == 5
    with pytest.raises(ValueError, match="budget_bytes is -1"):
        lower_bound_s(weight_bytes=700, budget_bytes=-1, resident_s=5, link_bytes_per_s=10)
    with pytest.raises(ValueError, match="link_bytes_per_s is 0"):
        lower_bound_s(weight_bytes=700, budget_bytes=1, resident_s=5, link_bytes_per_s=0)
