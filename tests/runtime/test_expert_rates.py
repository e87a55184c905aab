"""What is learned of experts from runs: parts of what was asked for, beside the published ones, and how often each bank
is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.plan.experts import HitRates, allocate_slots, find_banks
from penstock.plan.planner import Planner
from penstock.runtime.expert_rates import measured_hit_rates, slots_summary
from tests.experts.reference import ReferenceTable
from tests.plan.expert_programs import stacked
from tests.runtime.expert_harness import ExpertHarness, ExpertModel, schedule_of, write_experts
from tests.runtime.programs import a_method, a_program
from tests.runtime.session_harness import PAGE

EXPERTS = 64
NAMES = ("a", "b")
TOGETHER = {name: (name,) for name in NAMES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExpertModel:
    """Two banks that are alike, each with a method of its own."""
    path = tmp_path_factory.mktemp("experts") / "weights.ptd"
    schedules = [schedule_of(name, [(name, 0)]) for name in NAMES]
    return write_experts(path, schedules, dict.fromkeys(NAMES, (EXPERTS, 1024)))


def run(harness: ExpertHarness, method: int, calls: Sequence[Sequence[int]]) -> None:
    for call in calls:
        harness.ask = lambda routing, call=call: call  # type: ignore[misc]
        harness.run(method, check=False)


def tokens(count: int, rows: int = 8) -> list[list[int]]:
    """Half of each are always the same experts."""
    return [[*range(rows // 2), *((t * 7 + n * 5) % EXPERTS for n in range(rows // 2))] for t in range(count)]


def slots_by(model: ExpertModel, rates: dict[str, HitRates]) -> list[int]:
    banks = find_banks(model.schedules, model.weights, set(NAMES))
    given = allocate_slots(banks, 48 * 1024, PAGE, rates).slots
    return [given.get(name, 0) for name in NAMES]


def test_a_bank_with_enough_calls_stands_beside_one_without(model: ExpertModel) -> None:
    """Both are asked for the same: one has a curve of its own, the other the published one, and neither gets all."""
    with ExpertHarness(model) as harness:
        plan = harness.install_plan(model.with_slots(16, 16))
        before = slots_by(model, {})
        run(harness, 0, tokens(62))
        run(harness, 1, tokens(60))
        assert measured_hit_rates(harness.session, plan, {}, TOGETHER) == {}
        run(harness, 0, tokens(1))
        rates = measured_hit_rates(harness.session, plan, {}, TOGETHER)
        assert set(rates) == set(NAMES) and rates["b"].points == HitRates.usual(EXPERTS).points
        table = ReferenceTable(EXPERTS, EXPERTS)
        counts = [table.take(call) for call in [*tokens(62), *tokens(1)]][15:]
        hits = sum(hit for hit, _ in counts)
        assert rates["a"].at(EXPERTS) == pytest.approx(hits / sum(map(sum, counts)))
        assert 1.02 < rates["a"].share < 1.05 and rates["a"].share + rates["b"].share == pytest.approx(2.0)
        after = slots_by(model, rates)
        assert all(abs(one - other) <= 8 for one, other in zip(before, after, strict=True)), (before, after)


def test_slots_go_to_the_bank_that_is_asked_more_often(model: ExpertModel) -> None:
    """The same is asked of both: of one in every run, and of the other in every fourth."""
    with ExpertHarness(model) as harness:
        plan = harness.install_plan(model.with_slots(16, 16))
        for number in range(256):
            run(harness, 0, tokens(number + 1)[-1:])
            if number % 4 == 3:
                run(harness, 1, tokens(number // 4 + 1)[-1:])
        rates = measured_hit_rates(harness.session, plan, {}, TOGETHER)
        assert rates["a"].share == pytest.approx(4 * rates["b"].share, rel=0.02)
        often, rarely = slots_by(model, rates)
        assert often > rarely + 8
        # The other way round nobody asks for the first: what is known of it stays, and it gets what is left.
        harness.install_plan(plan)
        run(harness, 1, tokens(100))
        turned = measured_hit_rates(harness.session, plan, rates, TOGETHER)
        assert turned["a"].points == rates["a"].points and (turned["a"].share, turned["b"].share) == (0.0, 2.0)
        # How often a bank without slots is asked is not counted: the next plan takes it for one like others.
        alone = harness.install_plan(model.with_slots(0, 16))
        run(harness, 1, tokens(100))
        again = measured_hit_rates(harness.session, alone, turned, TOGETHER)
        assert again["a"].points == rates["a"].points and (again["a"].share, again["b"].share) == (1.0, 1.0)


def test_after_a_failed_run_the_log_begins_anew_and_what_was_learned_stays(model: ExpertModel) -> None:
    with ExpertHarness(model) as harness:
        plan = harness.install_plan(model.with_slots(16, 16))
        run(harness, 0, tokens(300))
        learned = measured_hit_rates(harness.session, plan, {}, TOGETHER)
        assert learned["a"].at(EXPERTS) > 0.4
        harness.begin()
        harness.give_up()
        for count in (0, 1, 61):
            run(harness, 0, tokens(count))
            assert measured_hit_rates(harness.session, plan, learned, TOGETHER) == {}
        run(harness, 0, tokens(1))
        again = measured_hit_rates(harness.session, plan, learned, TOGETHER)
        assert again["a"].at(EXPERTS) > 0.4 and again["a"].points != learned["a"].points


def test_a_call_that_asks_for_most_experts_is_logged_whole(model: ExpertModel) -> None:
    """As of several rows: of 33 different experts none is left out."""
    with ExpertHarness(model) as harness:
        plan = harness.install_plan(model.with_slots(16, 0))
        run(harness, 0, [[(t * 13 + n) % EXPERTS for n in range(33)] for t in range(100)])
        rates = measured_hit_rates(harness.session, plan, {}, TOGETHER)["a"]
        assert rates.at(EXPERTS) == 1.0 and rates.at(32) > 0.2


def test_what_was_learned_of_a_bank_holds_when_some_of_it_lies_there_whole(tmp_path: Path) -> None:
    """Its first weight is another then; and what is learned anew is true of all."""
    names = ("up", "down")
    shapes = dict.fromkeys([*names, "apart"], (EXPERTS, 1024))
    schedules = [schedule_of("both", [*((name, 0) for name in names), ("apart", 1)])]
    model = write_experts(tmp_path / "weights.ptd", schedules, shapes)
    together = {**dict.fromkeys(names, names), "apart": ("apart",)}
    with ExpertHarness(model) as harness:
        plan = harness.install_plan(model.with_slots(16, 16))
        run(harness, 0, tokens(100))
        learned = measured_hit_rates(harness.session, plan, {}, together)
        assert learned["up"] == learned["down"] and learned["up"].points != HitRates.usual(EXPERTS).points
        # As where "up" is held: of the first bank too little is logged, of the other enough.
        (first, second) = plan.banks
        left = dataclasses.replace(plan, banks=(dataclasses.replace(first, members=first.members[1:]), second))
        counts = [harness.session.expert_hits(number, [16])[0] for number in range(2)]
        played = {0: (1, 2, 3), 1: counts[1]}
        session = SimpleNamespace(
            expert_counts=harness.session.expert_counts, expert_hits=lambda number, slots: [played[number]] * len(slots)
        )
        again = measured_hit_rates(session, left, learned, together)  # type: ignore[arg-type]
        assert again["up"] == again["down"] and again["down"].points == learned["up"].points


def test_without_slots_nothing_is_learned(model: ExpertModel) -> None:
    with ExpertHarness(model) as harness:
        plan = harness.install_plan(model.with_slots(0, 0))
        run(harness, 0, tokens(100))
        assert measured_hit_rates(harness.session, plan, {}, TOGETHER) == {}
        assert measured_hit_rates(harness.session, None, {}, TOGETHER) == {}


@pytest.mark.parametrize("together", ["", "ab", "abcdef"])
def test_the_summary_counts_what_is_read_in_place_and_never_has_slots(together: str) -> None:
    """Not what has none at this budget, nor what is held."""
    schedules = [
        schedule_of("decode", [(name, number) for number, name in enumerate("abcdef")]),
        schedule_of("prefill", [(name, 0 if name in together else number) for number, name in enumerate("abcdef")]),
    ]
    weights = [stacked(name, 16, 4096) for name in "abcdef"]
    methods = [dataclasses.replace(a_method(name=one.method), schedule=one) for one in schedules]
    program = a_program(methods, weights)
    planner = Planner(schedules, {one.name: one for one in weights}, page_bytes=PAGE, placement="auto")
    plan = planner.plan(planner.floor_bytes)
    # One method takes them by one index, and the other each by its own.
    assert {*plan.direct_weights} == {*"abcdef"}
    told = [f"no slots for {len(together)} weights of experts (penstock inspect says why)"] if together else []
    assert slots_summary(program, plan) == told
    assert slots_summary(program, planner.plan(planner.full_bytes)) == slots_summary(program, None) == []
