"""Experts in plans: which weights make a bank, and that slots use what is left of a budget, and no byte more."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.check import check_plan
from penstock.plan.experts import (
    ExpertBank,
    HitRates,
    Slots,
    allocate_slots,
    bytes_before_held,
    find_banks,
    table_bytes,
    why_no_slots,
    with_slots,
)
from penstock.plan.plan import DIRECT, NO_SLOTS, MethodPlan, Placement, Plan
from penstock.plan.planner import Planner
from penstock.plan.tuning import (
    DEFAULT_HIT_RATES,
    EXPERTS_OF_A_TOKEN,
    SLOTS_BEFORE_HELD_PART,
    TOKENS_AFTER_PROMPT,
)
from penstock.schedule import Schedule
from penstock.weight import Weight, are_experts
from tests.plan.expert_programs import PAGE, ExpertProgram, expert_programs, schedule_of, stacked


def planner(program: ExpertProgram, page_bytes: int = PAGE) -> Planner:
    return Planner(program.schedules, program.weights, page_bytes=page_bytes, placement="auto")


@settings(max_examples=150)
@given(expert_programs(), st.floats(0, 1), st.sampled_from([PAGE, 64, 16 * PAGE]))
def test_every_plan_is_proved_and_within_its_budget(program: ExpertProgram, part: float, page_bytes: int) -> None:
    made = planner(program, page_bytes)
    for share in (0.0, part, 1.0):
        budget_bytes = made.floor_bytes + int((made.full_bytes - made.floor_bytes) * share)
        plan = made.plan(budget_bytes)
        check_plan(plan, program.schedules, program.weights, budget_bytes=budget_bytes)
        for bank in plan.banks:
            assert 1 <= bank.slots < bank.experts


def is_bank(program: ExpertProgram, names: frozenset[str]) -> bool:
    """Every method that takes rows of one of them takes rows of all by one index, before it takes any by the next; as
    is said of a bank, and not as find_banks does it."""
    weights = [program.weights[name] for name in names]
    if not all(map(are_experts, weights)) or len({weight.shape[0] for weight in weights}) != 1:
        return False
    for schedule in program.schedules:
        taken_by = [(access.weight, access.routing) for access in schedule.accesses if access.routing is not None]
        reads = [(name, by) for name, by in taken_by if name in names]
        # By the same index nothing else is taken.
        taken = {name for name, by in taken_by if by in {by for _, by in reads}}
        if taken - names or len(reads) % len(names):
            return False
        for begin in range(0, len(reads), len(names)):
            part = reads[begin : begin + len(names)]
            if {name for name, _ in part} != names or len({routing for _, routing in part}) != 1:
                return False
        if len({routing for _, routing in reads}) != len(reads) // len(names):
            return False
    return True


@settings(max_examples=400)
@given(expert_programs(), st.data())
def test_banks_are_what_every_method_reads_by_one_index(program: ExpertProgram, data: st.DataObject) -> None:
    left_out = data.draw(st.sets(st.sampled_from(sorted(program.names)), max_size=1))
    found = find_banks(program.schedules, program.weights, program.names - left_out)
    banks = {frozenset(bank.names) for bank in found}
    why = why_no_slots(program.schedules, program.weights)
    assert len(banks) == len(found) and sum(map(len, banks)) == len(frozenset().union(*banks))
    for bank in found:
        assert is_bank(program, frozenset(bank.names)) and not left_out & set(bank.names)
        assert {program.weights[name].shape[0] for name in bank.names} == {bank.experts}
        assert bank.row_bytes == sum(program.weights[name].row_bytes for name in bank.names)
    # And none is missed: what could be one is all that is taken by some index.
    for schedule in program.schedules:
        for routing in {access.routing for access in schedule.accesses} - {None}:
            names = frozenset(access.weight for access in schedule.accesses if access.routing == routing)
            assert (names in banks) == (is_bank(program, names) and not left_out & names)
            # Of the others it is said why.
            assert not names & why.keys() if is_bank(program, names) else names <= why.keys()


Reads = list[tuple[str, int | None]]
# As a routing: of rows that are taken by more than one index at once, which is none.
ROWS = -1


def with_rows(schedule: Schedule) -> Schedule:
    accesses = (replace(one, routing=None) if one.routing == ROWS else one for one in schedule.accesses)
    return replace(schedule, accesses=tuple(accesses))


@pytest.mark.parametrize("other", [None, ROWS], ids=["all of one", "other rows of one"])
def test_what_else_a_method_reads_of_them_is_no_matter(other: int | None) -> None:
    weights = {one: stacked(one, 8, 4096) for one in "abc"}
    reads: list[Reads] = [[("a", 0), ("b", 0), ("c", 1)], [("a", other), ("c", 4)]]
    schedules = [with_rows(schedule_of(f"method{number}", one)) for number, one in enumerate(reads)]
    assert why_no_slots(schedules, weights) == {}
    assert [bank.names for bank in find_banks(schedules, weights, weights.keys())] == [("a", "b"), ("c",)]


REASONS: dict[str, tuple[list[Reads], set[str], str]] = {
    "one is taken twice": (
        [[("a", 0), ("b", 0), ("a", 0), ("c", 1)]],
        {"a", "b"},
        "method 'method0' takes 'a' twice by one index",
    ),
    "one is left out": (
        [[("a", 0), ("b", 0), ("c", 1)], [("a", 0)]],
        {"a", "b"},
        "'b' is taken by its index in one place, and in another it is not",
    ),
    "one is taken with others, too": (
        [[("a", 0), ("b", 0)], [("a", 0), ("b", 0), ("c", 0)]],
        {"a", "b", "c"},
        "'c' is taken by its index in one place, and in another it is not",
    ),
    "two indexes at once": (
        [[("a", 0), ("a", 1), ("b", 1), ("b", 0), ("c", 2)]],
        {"a", "b"},
        "method 'method0' takes 'a' by one index before it has taken all by another",
    ),
    "other experts": (
        [[("a", 0), ("odd", 0), ("c", 1)]],
        {"a", "odd"},
        "'odd' and 'a' are taken by the same index, and have shapes [7, 4096] and [8, 4096]",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_experts_have_no_slots(name: str) -> None:
    """All that would lie in the bank have none; others keep theirs."""
    reads, without, reason = REASONS[name]
    weights = {one: stacked(one, 8, 4096) for one in "abc"} | {"odd": stacked("odd", 7, 4096)}
    schedules = [with_rows(schedule_of(f"method{number}", one)) for number, one in enumerate(reads)]
    assert why_no_slots(schedules, weights) == dict.fromkeys(sorted(without), reason)
    banks = find_banks(schedules, weights, weights.keys())
    assert {one for bank in banks for one in bank.names} == {one for read in reads for one, _ in read} - without


@st.composite
def bank_lists(draw: st.DrawFn, *, alike: bool = False) -> list[ExpertBank]:
    # Of those that are alike each expert has more bytes than a table, as real ones do by far; and there are so many
    # that none lies there whole, which takes no table, while others have next to no slots.
    row_units = st.integers(1024, 4096) if alike else st.integers(1, 400)
    experts = [16, 60, 128] if alike else [2, 5, 16, 60, 128]
    sizes = st.tuples(st.sampled_from(experts), row_units, st.integers(1, 3))
    of_all = draw(sizes)
    made = []
    for number in range(draw(st.integers(1, 6))):
        count, units, members = of_all if alike else draw(sizes)
        made.append(ExpertBank(tuple(f"b{number}.{one}" for one in range(members)), count, 16 * units * members))
    return made


def weights_of(banks: list[ExpertBank]) -> dict[str, Weight]:
    return {
        name: stacked(name, bank.experts, bank.row_bytes // len(bank.names)) for bank in banks for name in bank.names
    }


def schedule(banks: list[ExpertBank]) -> Schedule:
    return schedule_of("forward", [(name, number) for number, bank in enumerate(banks) for name in bank.names])


def direct_plan(banks: list[ExpertBank], page_bytes: int) -> Plan:
    """That reads everything where it lies, and takes nothing."""
    weights = weights_of(banks)
    placements = tuple(
        Placement(access.number, access.weight, weights[access.weight].nbytes, DIRECT, 0, None, bank=NO_SLOTS)
        for access in schedule(banks).accesses
    )
    return Plan(page_bytes, (), (), (), (MethodPlan("forward", placements, (), (), len(placements)),))


def slots_in_all(banks: list[ExpertBank], slots: Slots) -> int:
    whole = sum(bank.experts for bank in banks if bank.names[0] in slots.whole)
    return sum(slots.slots.values()) + whole


def step_bytes(bank: ExpertBank, slots: int) -> int:
    """At most so many more for the next step of the bank, wherever in a page it begins."""
    after = max(slots + 1, bank.fewest_slots)
    table = 0 if slots else table_bytes(bank.experts, after) + 256
    return (after - slots) * bank.row_bytes + table + len(bank.names) * 256 + 256


@settings(max_examples=300)
@given(bank_lists(), st.floats(0, 1.1), st.sampled_from([PAGE, 64, 16 * PAGE]))
def test_what_is_left_is_used_to_within_one_slot(banks: list[ExpertBank], part: float, page_bytes: int) -> None:
    weights = weights_of(banks)
    spare_bytes = int(sum(weight.nbytes for weight in weights.values()) * part)
    slots = allocate_slots(banks, spare_bytes, page_bytes, {})
    plan = with_slots(direct_plan(banks, page_bytes), [schedule(banks)], weights, banks, slots)
    check_plan(plan, [schedule(banks)], weights, budget_bytes=spare_bytes)
    assert [bank.slots for bank in plan.banks] == list(slots.slots.values())
    whole_bytes = sum(-(-weights[name].nbytes // 256) * 256 for name in slots.whole)
    used = plan.device_bytes + -(-whole_bytes // page_bytes) * page_bytes
    assert page_bytes % 256 or used <= spare_bytes
    open_banks = [bank for bank in banks if bank.names[0] not in slots.whole]
    if open_banks:
        cheapest = min(step_bytes(bank, slots.slots.get(bank.names[0], 0)) for bank in open_banks)
        # Slots and what is whole lie in a block each, which end with a page, and each weight's begin with a multiple.
        rounding = 2 * page_bytes + len(weights) * 512
        # Banks that came to lie there whole have given their tables up, for which others had been refused.
        tables = sum(table_bytes(bank.experts, bank.experts) for bank in banks if bank.names[0] in slots.whole)
        assert used + cheapest + rounding + tables > spare_bytes


@settings(max_examples=200)
@given(bank_lists(alike=True), st.lists(st.floats(0, 1.2), min_size=2, max_size=12))
def test_of_banks_that_are_alike_more_memory_gives_no_fewer_slots(banks: list[ExpertBank], parts: list[float]) -> None:
    """Of others it may: a bank with large experts may be worth more, and take the room of several slots."""
    all_bytes = sum(bank.experts * bank.row_bytes for bank in banks)
    counts = []
    for part in sorted(parts):
        slots = allocate_slots(banks, int(all_bytes * part), PAGE, {})
        counts.append(slots_in_all(banks, slots))
        some = [slots.slots[bank.names[0]] for bank in banks if bank.names[0] in slots.slots]
        # Banks are filled evenly, and from where each slot saves the same one after the other.
        stretch = HitRates.usual(banks[0].experts).last_stretch
        even = [count for count in some if count <= stretch]
        assert len(even) >= len(some) - 1
        assert not even or max(even) - min(even) <= 1
        assert not slots.whole or not even or min(even) >= stretch
    assert counts == sorted(counts)


def test_on_the_last_stretch_banks_come_to_lie_there_whole_one_by_one() -> None:
    """Which of them gets the slots makes no difference to the link, and a bank that lies there whole has no lookups."""
    banks = [ExpertBank((f"bank {n}",), 128, 1 << 20) for n in range(12)]
    all_bytes = sum(bank.experts * bank.row_bytes for bank in banks)
    for part, whole in ((0.6, 0), (0.7, 1), (0.8, 5), (0.9, 8), (0.95, 10)):
        slots = allocate_slots(banks, int(all_bytes * part), 2 << 20, {})
        assert len(slots.whole) == whole
        assert sorted(slots.slots.values())[:-1] == [82] * (11 - whole) or not whole
    # Other methods read all of these, so slots for all of their experts would not make them lie there whole.
    streamed = [replace(bank, streamed=frozenset(bank.names)) for bank in banks]
    counts = allocate_slots(streamed, int(all_bytes * 0.9), 2 << 20, {}).slots.values()
    assert max(counts) - min(counts) <= 1


def test_slots_go_where_the_next_one_saves_most() -> None:
    banks = [ExpertBank((name,), 16, 4096) for name in ("even", "steep")]
    rates = {
        "even": HitRates(tuple((n, n / 16) for n in range(17))),
        "steep": HitRates(((0, 0.0), (4, 0.9), (16, 1.0))),
    }
    slots = allocate_slots(banks, 17 * PAGE, PAGE, rates).slots
    assert slots["steep"] == 4 and slots["even"] > 4
    # A bank that needs no more of it lets others have it, and lies there whole only when nobody else does better.
    everything = allocate_slots(banks, 40 * PAGE, PAGE, rates)
    assert not everything.slots and set(everything.whole) == {"even", "steep"}


def test_with_less_than_the_fewest_slots_there_are_none() -> None:
    bank = ExpertBank(("a",), 60, 4096)
    assert bank.fewest_slots == 3
    held = -(-table_bytes(60, 3) // 256) * 256 + 3 * 4096 + 256
    counts = [allocate_slots([bank], pages * PAGE, PAGE, {}).slots.get("a", 0) for pages in range(10)]
    assert counts == sorted(counts) and set(counts) & {1, 2} == set()
    assert counts.index(3) == -(-held // PAGE)


def test_hit_rates_are_taken_as_a_curve_that_bends_down() -> None:
    """A step that was measured would hold slots back that pay only together."""
    rates = HitRates(((0, 0.0), (1, 0.0), (4, 0.8), (8, 0.8), (16, 1.0)))
    gains = [rates.gain(slots) for slots in range(16)]
    assert gains == sorted(gains, reverse=True) and gains[0] == pytest.approx(0.2)
    assert rates.gain(16) == 0.0
    assert [rates.at(slots) for slots in (0, 4, 16, 20)] == pytest.approx([0.0, 0.8, 1.0, 1.0])


def test_both_blocks_are_rounded_up_by_themselves() -> None:
    """Slots of one bank and another bank whole: together they would fit, but for the page that each begins."""
    small, large = ExpertBank(("small",), 2, 1040), ExpertBank(("large",), 60, 1040)
    weights = weights_of([small, large])
    seen = set()
    for pages in range(1, 18):
        slots = allocate_slots([small, large], pages * PAGE, PAGE, {})
        plan = with_slots(direct_plan([small, large], PAGE), [schedule([small, large])], weights, [small, large], slots)
        whole = sum(-(-weights[name].nbytes // 256) * 256 for name in slots.whole)
        assert plan.device_bytes + -(-whole // PAGE) * PAGE <= pages * PAGE
        seen.add((bool(slots.slots), bool(slots.whole)))
    assert (True, True) in seen


def test_experts_that_lie_there_whole_are_in_no_bank() -> None:
    """A bank that has a slot for every expert beside one that has not; and a table of the weights that are not one."""
    program = ExpertProgram(
        (schedule_of("forward", [("few", 0), ("many", 1), ("plain", None)]),),
        {
            "few": stacked("few", 2, 2048),
            "many": stacked("many", 60, 4096),
            "plain": Weight("plain", "uint8", (5000,), (0,)),
        },
    )
    made = planner(program)
    kinds = set()
    for budget_bytes in range(made.floor_bytes, made.full_bytes, PAGE):
        plan = made.plan(budget_bytes)
        check_plan(plan, program.schedules, program.weights, budget_bytes=budget_bytes)
        few, many, _ = plan.methods[0].placements
        assert (few.bank is None) == (not few.is_direct) and (many.bank is None) == (not many.is_direct)
        kinds.add((few.bank, many.bank))
    assert (None, 0) in kinds


def test_default_rates_rise_with_the_part_that_has_slots() -> None:
    for experts in (1, 2, 8, 128, 4096):
        rates = HitRates.usual(experts)
        assert rates.at(experts) == 1.0 and rates.at(0) == 0.0
        assert all(rates.at(n) <= rates.at(n + 1) for n in range(0, experts, max(1, experts // 50)))
    assert ExpertBank(("a",), 4096, 16).fewest_slots == -(-4096 * Fraction(1, 20) // 1)


def prompt_and_token(layers: int, experts: int, row_bytes: int, dense_bytes: int) -> ExpertProgram:
    """A prompt reads all experts, as it has to where they are quantized; a token takes rows of them."""
    weights: dict[str, Weight] = {}
    reads: dict[str, list[tuple[str, int | None]]] = {"prefill": [], "decode": []}
    for layer in range(layers):
        dense = f"dense{layer}"
        weights[dense] = Weight(dense, "uint8", (dense_bytes,), (0,))
        names = [f"up{layer}", f"down{layer}"]
        weights |= {name: stacked(name, experts, row_bytes) for name in names}
        reads["prefill"] += [(dense, None), *((name, None) for name in names)]
        reads["decode"] += [(dense, None), *((name, layer) for name in names)]
    return ExpertProgram(tuple(schedule_of(method, one) for method, one in reads.items()), weights)


def test_experts_that_a_prompt_reads_whole_have_slots_before_any_is_held_for_it() -> None:
    """What else is read comes first; then slots, up to 38% of the experts; then experts that the prompt need not have
    streamed; and in the end everything."""
    program = prompt_and_token(layers=6, experts=32, row_bytes=2 * PAGE, dense_bytes=8 * PAGE)
    made = planner(program)
    expert_bytes = sum(weight.nbytes for weight in program.weights.values() if are_experts(weight))
    parts: list[float] = []
    streamed: list[int] = []
    for share in range(21):
        budget_bytes = made.floor_bytes + (made.full_bytes - made.floor_bytes) * share // 20
        plan = made.plan(budget_bytes)
        check_plan(plan, program.schedules, program.weights, budget_bytes=budget_bytes)
        slots_bytes = sum(bank.slots * bank.row_bytes for bank in plan.banks)
        assert slots_bytes <= 0.42 * expert_bytes
        parts.append(slots_bytes / expert_bytes)
        streamed.append(plan.method("prefill").warm.bytes_streamed)
        in_slots = {member.weight for bank in plan.banks for member in bank.members}
        for placement in plan.method("decode").placements:
            # Whatever is held for the prompt is not held twice.
            assert placement.has_slots == (placement.weight in in_slots)
        if slots_bytes and share < 20:
            assert plan.method("decode").warm.bytes_streamed == 0, "all that is dense is held before any slot"
    top = parts.index(max(parts))
    assert parts[0] == 0 and parts[-1] == 0 and max(parts) > 0.3 and 0 < top < 20
    assert parts[:top] == sorted(parts[:top])
    assert all(after <= 1.005 * before for before, after in pairwise(streamed)) and streamed[-1] == 0
    assert streamed[top] >= 0.9 * expert_bytes


def test_a_bank_is_of_those_that_are_not_held() -> None:
    """A weight of a bank that lies there whole, for the prompt, takes no slots; the others share theirs."""
    reads: dict[str, list[tuple[str, int | None]]] = {"prefill": [], "decode": []}
    weights: dict[str, Weight] = {}
    for layer in range(6):
        names = {f"small{layer}": 1040, f"large{layer}": 2 * PAGE}
        weights |= {name: stacked(name, 16, row_bytes) for name, row_bytes in names.items()}
        reads["prefill"] += [(name, None) for name in names]
        reads["decode"] += [(name, layer) for name in names]
    schedules = [schedule_of(method, one) for method, one in reads.items()]
    made = Planner(schedules, weights, page_bytes=PAGE, placement="auto")
    members: set[str] = set()
    for share in range(20):
        budget_bytes = made.floor_bytes + (made.full_bytes - made.floor_bytes) * share // 20
        plan = made.plan(budget_bytes)
        check_plan(plan, schedules, weights, budget_bytes=budget_bytes)
        members |= {member.weight for bank in plan.banks for member in bank.members}
    assert members == {f"large{layer}" for layer in range(6)}


def test_the_part_that_has_slots_before_any_is_held_follows_from_the_rates() -> None:
    """What a byte more saves of the link from one prompt to the next, in slots and held."""
    uses = TOKENS_AFTER_PROMPT * EXPERTS_OF_A_TOKEN
    for (low, low_rate), (high, high_rate) in pairwise(DEFAULT_HIT_RATES):
        in_slots = (high_rate - low_rate) / (high - low) * uses
        held = ((1 - low_rate) * uses + 1) / (1 - low)
        assert (in_slots > held) == (high <= SLOTS_BEFORE_HELD_PART)


@settings(max_examples=300)
@given(bank_lists(), st.lists(st.integers(-(2**20), 2**26), min_size=2, max_size=8))
def test_more_memory_never_leaves_less_for_what_streams(banks: list[ExpertBank], spares: list[int]) -> None:
    banks = [replace(bank, streamed=frozenset(bank.names if number % 3 else ())) for number, bank in enumerate(banks)]
    all_bytes = sum(bank.experts * bank.row_bytes for bank in banks if bank.streams)
    left = []
    for spare_bytes in sorted(spares):
        kept_bytes = bytes_before_held(banks, spare_bytes)
        assert 0 <= kept_bytes <= max(min(spare_bytes, SLOTS_BEFORE_HELD_PART * all_bytes), 0)
        assert kept_bytes == 0 or spare_bytes < all_bytes
        left.append(spare_bytes - kept_bytes)
    # But for rounding to bytes.
    assert all(after >= before - 1 for before, after in pairwise(left))
