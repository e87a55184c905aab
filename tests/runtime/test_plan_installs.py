"""No plan reaches a session unproved, and the core refuses what it can see by itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import PenstockError
from penstock.plan.check import PlanError, check_plan
from penstock.plan.plan import Block, Copy, Plan, Range
from penstock.plan.planner import Planner
from penstock.record import VERSION
from penstock.runtime.plan_installer import FIRST_RUNS
from penstock.runtime.records import Numbers, plan_numbers
from tests.runtime.modules import SCRIPTS, floor_of, play
from tests.runtime.session_harness import PAGE, Model, SessionHarness, chain, write_model

NAMES = [f"w{index}" for index in range(6)]


@contextmanager
def a_planner_that_errs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its plans are of one step more than the program has, whatever the mode."""
    right = Planner.plan

    def wrong(planner: Planner, *arguments: Any) -> Plan:
        plan = right(planner, *arguments)
        return replace(plan, methods=tuple(replace(one, step_count=one.step_count + 1) for one in plan.methods))

    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plan", wrong)
        yield


def test_under_a_cap_no_plan_reads_weights_in_host_memory(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Planner.__init__

    def wrong(planner: Planner, *arguments: Any, **options: Any) -> None:
        right(planner, *arguments, **{**options, "placement": "in-place"})

    monkeypatch.setattr(Planner, "__init__", wrong)
    with penstock.Module(chain, 0) as module:
        assert module.plan is not None and module.plan.direct_weights
    with pytest.raises(PlanError, match="is read in host memory, where under a cap it does not stay"):
        penstock.Module(chain, 0, host_memory="1MiB")


def test_every_way_to_a_session_leads_through_the_check(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = floor_of(decoder) + 4 * PAGE

    def run() -> None:
        module.reset_state()
        play(module.run_method, SCRIPTS["decoder"])

    with a_planner_that_errs(monkeypatch), pytest.raises(PlanError, match="steps; the plan says"):
        penstock.Module(decoder, budget)
    with penstock.Module(decoder, budget) as module:
        plan = module.plan
        with a_planner_that_errs(monkeypatch), pytest.raises(PlanError, match="steps; the plan says"):
            module.set_budget(budget + PAGE)
        with a_planner_that_errs(monkeypatch), pytest.raises(PlanError, match="steps; the plan says"):
            module.plan_at(budget)
        with a_planner_that_errs(monkeypatch), pytest.raises(PlanError, match="steps; the plan says"):
            with module.calibrate():
                run()
        assert module.plan is plan and module.calibration is None
        with module.calibrate():
            run()
        plan = module.plan
        with a_planner_that_errs(monkeypatch), pytest.raises(PlanError, match="steps; the plan says"):
            with module.calibrate(in_place=True):
                pytest.fail("everything is in place though no plan says so")
        with (
            ExitStack() as stack,
            pytest.raises(PlanError, match="steps; the plan says"),
            module.calibrate(in_place=True),
        ):
            run()
            stack.enter_context(a_planner_that_errs(monkeypatch))
        assert module.plan is plan
        run()
    with penstock.Module(decoder, budget, calibration="first-runs") as module:
        with a_planner_that_errs(monkeypatch), pytest.raises(PlanError, match="steps; the plan says"):
            for _ in range(FIRST_RUNS + 1):
                run()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return write_model(tmp_path / "w.ptd", [chain(*NAMES)], dict.fromkeys(NAMES, 2 * PAGE))


def with_copies(plan: Plan, copies: list[Copy]) -> Plan:
    method = replace(plan.methods[0], copies=tuple(sorted(copies, key=lambda copy: copy.issue_before)))
    return replace(plan, methods=(method, *plan.methods[1:]))


def with_piece(plan: Plan, index: int, **changes: Any) -> Plan:
    copies = list(plan.methods[0].copies)
    copies[index] = replace(copies[index], piece=replace(copies[index].piece, **changes))
    return with_copies(plan, copies)


def late(plan: Plan) -> Plan:
    """Its stay's page is in other hands when it is read: what a run finds there is left over from the last."""
    copies = list(plan.methods[0].copies)
    return with_copies(plan, [replace(copies[0], issue_before=len(NAMES)), *copies[1:]])


def halved(plan: Plan) -> Plan:
    copies = list(plan.methods[0].copies)
    piece = copies[0].piece
    half = PAGE // 2
    moved: dict[str, Any] = {
        "weight_offset_bytes": piece.weight_offset_bytes + half,
        "range_offset_bytes": piece.range_offset_bytes + half,
        "nbytes": piece.nbytes - half,
    }
    first = replace(copies[0], piece=replace(piece, nbytes=half))
    return with_copies(plan, [first, replace(copies[0], piece=replace(piece, **moved)), *copies[1:]])


def unmapped_twice(plan: Plan) -> Plan:
    block = plan.ranges[0].blocks[0]
    return replace(plan, ranges=(replace(plan.ranges[0], blocks=(block, block)), *plan.ranges[1:]))


def misplaced(plan: Plan) -> Plan:
    """In a range that is a page longer."""
    method = plan.methods[0]
    placed = replace(method.placements[0], range_offset_bytes=8)
    area = plan.ranges[placed.range_index]
    ranges = list(plan.ranges)
    ranges[placed.range_index] = Range(area.nbytes + PAGE, (*area.blocks, len(plan.blocks)))
    blocks = (*plan.blocks, Block(PAGE, ring=False))
    methods = (replace(method, placements=(placed, *method.placements[1:])),)
    return replace(plan, blocks=blocks, ranges=tuple(ranges), methods=methods)


def unread(plan: Plan) -> Plan:
    method = plan.methods[0]
    placed = replace(method.placements[0], stay=method.placements[1].stay)
    return replace(plan, methods=(replace(method, placements=(placed, *method.placements[1:])),))


def longer_stay(plan: Plan) -> Plan:
    method = plan.methods[0]
    stay = replace(method.stays[0], nbytes=method.stays[0].nbytes + 1)
    return replace(plan, methods=(replace(method, stays=(stay, *method.stays[1:])),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (late, r"access \d should find stay \d in block \d, where stay \d was copied to after it"),
        (
            halved,
            r"copy \d takes bytes 0 to 2048 of its range; it must begin with a page of 4096 bytes, and end with",
        ),
        (unmapped_twice, r"a range maps block \d twice"),
        (misplaced, "access 0 begins at byte 8 of its range; kernels need a multiple of 256"),
        (unread, r"copy \d does not go where access 0 reads it"),
        (longer_stay, r"stay 0 has 8193 bytes, its copies have 8192"),
        (lambda plan: with_piece(plan, 0, nbytes=3 * PAGE), "needs to be in|is more than stay"),
        (lambda plan: with_copies(plan, [*plan.methods[0].copies, plan.methods[0].copies[0]]), "is more than stay"),
    ],
)
def test_the_core_refuses(model: Model, change: Callable[[Plan], Plan], message: str) -> None:
    plan = model.plan(model.floor_bytes)
    with SessionHarness(model) as harness:
        harness.install_plan(plan)
        broken = change(plan)
        with pytest.raises(PlanError):
            check_plan(broken, model.schedules, model.weights)
        with pytest.raises(PenstockError, match=message):
            harness.session.install(plan_numbers(broken, model.weights))
        # What was installed still is.
        harness.run()


def changed(numbers: Numbers, change: Callable[[list[int]], None]) -> Numbers:
    values = list(numbers)
    change(values)
    return (ctypes.c_int64 * len(values))(*values)


def test_the_core_refuses_numbers_that_no_plan_makes(model: Model) -> None:
    plan = model.plan(model.floor_bytes)
    numbers = plan_numbers(plan, model.weights)
    prologue = plan.methods[0].prologue
    assert len(prologue) > 1 and list(numbers)[-len(prologue) :] == list(prologue)

    def twice(values: list[int]) -> None:
        values[-1] = values[-2]

    def fewer(values: list[int]) -> None:
        del values[-1]
        values[-len(prologue)] -= 1

    def huge_blocks(values: list[int]) -> None:
        values[2] = values[3] = 2**62

    def odd_block(values: list[int]) -> None:
        values[2] += 1

    def earlier(values: list[int]) -> None:
        values[0] = 7

    def beyond(values: list[int]) -> None:
        """The first copy begins with the last byte of its weight."""
        copy = plan.methods[0].copies[0]
        record = [copy.stay, copy.issue_before, -1 if copy.wait_step is None else copy.wait_step]
        record += [list(model.weights).index(copy.piece.weight), copy.piece.weight_offset_bytes, copy.piece.nbytes]
        at = next(at for at in range(len(values)) if values[at : at + 6] == record)
        values[at + 4] = model.weights[copy.piece.weight].nbytes - 1

    cases: list[tuple[Callable[[list[int]], None], str]] = [
        (twice, r"copy \d enters twice"),
        (fewer, r"is fetched after 0 of the 1 copies of its stay; the others are issued behind it"),
        (huge_blocks, "needs to be in"),
        (earlier, f"the records of the plan are of version 7, needs version {VERSION}"),
        (beyond, r"needs to be in \[1, 2\)"),
        (odd_block, r"block 0 has 4097 bytes, a page has 4096"),
    ]
    with SessionHarness(model) as harness:
        for change, message in cases:
            with pytest.raises(PenstockError, match=message):
                harness.session.install(changed(numbers, change))
        harness.install_plan(plan)
        harness.run()


def test_weights_that_do_not_lie_in_the_file_are_refused(model: Model) -> None:
    for extent in ((-1, 1), (0, -1), (model.file_bytes, 1), (1, 2**63 - 1), (2**63 - 1, 2**63 - 1)):
        broken = replace_first(model, extent)
        with pytest.raises(
            PenstockError, match=rf"is truncated: it has \d+ bytes, and {extent[1]} bytes from byte {extent[0]} on"
        ):
            SessionHarness(broken)


def replace_first(model: Model, extent: tuple[int, int]) -> Model:
    class Broken(Model):
        @property
        def extents(self) -> list[tuple[int, int]]:
            return [extent, *super().extents[1:]]

    return Broken(model.schedules, model.weights, model.offsets, model.path)
