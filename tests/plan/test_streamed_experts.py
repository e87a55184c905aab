"""Experts that some methods read whole, and others by index: memory goes where it saves the most; none lies idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from penstock.plan.calibration import Calibration, Link
from penstock.plan.check import check_plan
from penstock.plan.menu import Menu
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.plan.tuning import WORTHWHILE_TIMES
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.expert_programs import ExpertProgram, schedule_of, stacked

PAGE = 2 << 20
MIB = 1 << 20
LAYERS = 8
LINK = Link(50e9, 4e-6)


def program(
    *,
    experts: int = 16,
    head_mib: int = 0,
    pinned: Sequence[int] = (),
    read_whole: Sequence[int] = range(LAYERS),
    by_tokens_too: bool = False,
) -> ExpertProgram:
    """Layers of 8 MiB and of experts of 16 MiB together. A prompt reads these as they are where they are in
    `read_whole`, of which those that are `pinned` stay; a token takes rows. A head of the tokens only."""
    weights: dict[str, Weight] = {}
    prompt: list[tuple[str, int | None]] = []
    token: list[tuple[str, int | None]] = []
    for layer in range(LAYERS):
        dense, name = f"dense{layer}", f"experts{layer}"
        weights |= {dense: stacked(dense, 8, MIB), name: stacked(name, experts, 16 * MIB // experts)}
        prompt += [(dense, None), (name, None if layer in read_whole else layer)]
        token += [(dense, None), *([(name, None)] if by_tokens_too else []), (name, layer)]
    if head_mib:
        weights["head"] = stacked("head", head_mib, MIB)
        token.append(("head", None))
    stays = {f"experts{layer}" for layer in pinned}
    first, second = schedule_of("prefill", prompt), schedule_of("decode", token)
    accesses = tuple(replace(one, pinned=one.weight in stays and not one.gathered) for one in first.accesses)
    made = (replace(first, accesses=accesses), second)
    return ExpertProgram(made[1:] if by_tokens_too else made, weights)


def planner(made: ExpertProgram) -> Planner:
    return Planner(made.schedules, made.weights, page_bytes=PAGE, placement="auto")


def budgets(made: Planner, parts: int = 8) -> list[int]:
    return [made.floor_bytes + (made.full_bytes - made.floor_bytes) * part // parts for part in range(parts + 1)]


CASES = {
    "a prompt reads all": program(),
    "a head that only tokens read": program(head_mib=300),
    "half is pinned": program(pinned=range(0, LAYERS, 2)),
    "all is pinned": program(pinned=range(LAYERS)),
    "one expert in each bank": program(experts=1),
    "two": program(experts=2),
    "a prompt reads one layer in two": program(read_whole=range(0, LAYERS, 2)),
    "tokens read them whole as well": program(by_tokens_too=True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_for_slots_is_used_and_makes_nothing_slower(case: str) -> None:
    made, without = planner(CASES[case]), planner(CASES[case])
    for budget_bytes in budgets(made):
        plan = made.plan(budget_bytes)
        check_plan(plan, CASES[case].schedules, CASES[case].weights, budget_bytes=budget_bytes)
        with mock.patch.object(Menu, "pages_for_experts", return_value=0):
            nothing_kept = without.plan(budget_bytes)
        assert made.seconds(plan, None) <= 1.001 * made.seconds(nothing_kept, None)
        if plan.takes_link and not plan.banks:
            assert budget_bytes - plan.device_bytes <= PAGE
        elif plan.takes_link:
            # A slot of each bank is of no use where all of its experts would have one.
            assert budget_bytes - plan.device_bytes <= PAGE + sum(bank.row_bytes for bank in plan.banks)


def copied_bytes(plan: Plan, method: str) -> int:
    return plan.method(method).warm.bytes_streamed


def test_what_only_tokens_read_streams_last() -> None:
    """It would stream in each of them, and experts in prompts."""
    made = planner(CASES["a head that only tokens read"])
    found = [made.plan(budget_bytes) for budget_bytes in budgets(made)]
    assert any(copied_bytes(plan, "prefill") and plan.banks for plan in found)
    for plan in found:
        assert not plan.banks or not copied_bytes(plan, "decode")


def test_the_ring_has_room_to_run_ahead_before_there_are_slots() -> None:
    """Though the experts of a layer are one weight, which takes most of it: else dense weights stream for that."""
    made = planner(CASES["a prompt reads all"])
    for budget_bytes in range(104 * MIB, 140 * MIB, PAGE):
        plan = made.plan(budget_bytes)
        assert plan.banks and not copied_bytes(plan, "decode")


def test_of_what_must_stay_nothing_is_kept_for_slots() -> None:
    for case in ("all is pinned", "tokens read them whole as well"):
        made = planner(CASES[case])
        assert all(not made.plan(budget_bytes).banks for budget_bytes in budgets(made))


def test_a_bank_is_held_whole_where_no_prompt_reads_what_is_left_of_it() -> None:
    """Of the bank (read, other) a prompt reads the one, which is held for it; the other is like any bank then."""
    weights = {f"dense{layer}": stacked(f"dense{layer}", 8, MIB) for layer in range(4)}
    weights |= {name: stacked(name, 8, nbytes) for name, nbytes in {"read": MIB, "other": MIB // 4}.items()}
    weights["apart"] = stacked("apart", 64, MIB)
    dense: list[tuple[str, int | None]] = [(f"dense{layer}", None) for layer in range(4)]
    token: list[tuple[str, int | None]] = [*dense[:2], ("read", 0), ("other", 0), dense[2], ("apart", 1), dense[3]]
    schedules = [schedule_of("prefill", [*dense[:2], ("read", None), *dense[2:]]), schedule_of("decode", token)]
    made = Planner(schedules, weights, page_bytes=PAGE, placement="auto")
    plan = made.plan(made.full_bytes - 2 * PAGE)
    assert {member.weight for bank in plan.banks for member in bank.members} == {"apart"}
    assert set(plan.direct_weights) == {"apart"}


def timed(schedules: Sequence[Schedule], weights: dict[str, Weight], prefill: float, decode: float) -> Calibration:
    """Steps with everything on the device, beside what the link takes; and in place so many times as long as that."""
    resident, in_place = {}, {}
    for schedule in schedules:
        times, part = (prefill, 0.3) if schedule.method == "prefill" else (decode, 0.02)
        link_s = [0 if one.gathered else weights[one.weight].nbytes / LINK.bytes_per_s for one in schedule.accesses]
        resident[schedule.method] = tuple(1e-6 + part * one for one in link_s)
        in_place[schedule.method] = tuple(1e-6 + times * one for one in link_s)
    return Calibration(LINK, resident, in_place)


@pytest.mark.parametrize("prefill", [20.0, 1.0])
def test_the_floor_is_worth_having(prefill: float) -> None:
    """Where experts stream in one placement and are read in place in another, both are judged for as many tokens."""
    made = planner(CASES["a prompt reads all"])
    times = timed(
        CASES["a prompt reads all"].schedules, CASES["a prompt reads all"].weights, prefill, 5.0 * prefill / 20
    )
    floor_bytes = made.floor_for(times)
    at_floor, copying = (made.seconds(made.plan(one, times), times) for one in (floor_bytes, made.copying_bytes))
    assert at_floor <= WORTHWHILE_TIMES * copying
    assert (floor_bytes == made.copying_bytes) == (prefill > WORTHWHILE_TIMES)


def test_no_more_is_kept_for_slots_than_pays() -> None:
    """Banks of three experts and of up to three weights, some read twice by a prompt, and small pages: the ring needs
    them more."""
    kib = {"dense0": 13, "dense1": 10, "dense2": 22, "dense3": 13, "dense4": 22, "head": 51, "first": 3}
    weights = {name: stacked(name, size, 1024) for name, size in kib.items()}
    sizes = [(14384,), (4320, 7264, 7968), (15232,), (5728, 11280, 13200), (12224, 4096)]
    twice, stays = {"experts1.1", "experts2.0", "experts4.1"}, {"experts0.0", "experts3.2"}
    prompt: list[tuple[str, int | None]] = [("first", None)]
    token: list[tuple[str, int | None]] = []
    for layer, row_bytes in enumerate(sizes):
        names = [f"experts{layer}.{number}" for number in range(len(row_bytes))]
        weights |= {name: stacked(name, 3, size) for name, size in zip(names, row_bytes, strict=True)}
        prompt += [(f"dense{layer}", None), *((name, None) for name in names for _ in range(1 + (name in twice)))]
        token += [(f"dense{layer}", None), *((name, layer) for name in names)]
    second, first = schedule_of("decode", [*token, ("head", None)]), schedule_of("prefill", prompt)
    first = replace(first, accesses=tuple(replace(one, pinned=one.weight in stays) for one in first.accesses))
    for pages in (60, 80, 91, 94, 99):
        made, without = (Planner((second, first), weights, page_bytes=4096, placement="auto") for _ in range(2))
        plan = made.plan(pages * 4096)
        check_plan(plan, (second, first), weights, budget_bytes=pages * 4096)
        with mock.patch.object(Menu, "pages_for_experts", return_value=0):
            nothing_kept = without.plan(pages * 4096)
        assert made.seconds(plan, None) <= 1.001 * made.seconds(nothing_kept, None)
