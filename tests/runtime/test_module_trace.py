"""A trace shows what ran: every copy of the plan and every step once, in order, on the device's clock."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import penstock
from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.program import Program
from tests.runtime.modules import (
    PAGE,
    SCRIPTS,
    SETUPS,
    LruModel,
    Watched,
    at_the_floor,
    hooks,
    play,
    same,
)

ResidentBits = Callable[[str], list[list[Tensor]]]
Event = dict[str, Any]
# Times are written in microseconds, from whole nanoseconds.
CLOCK_US = 1e-3


def spans(path: Path) -> dict[str, list[Event]]:
    """The spans of each lane, in the order of the file, after a look at the frame around them."""
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ns"
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "copy"]
    lanes: dict[str, list[Event]] = {"compute": [], "copy": []}
    for event in document["traceEvents"]:
        if event["ph"] == "M":
            continue
        assert event["ph"] == "X" and event["dur"] >= 0 and event["cat"] == names[event["tid"]]
        lanes[event["cat"]].append(event)
    return lanes


def traced(module: penstock.Module, path: Path, name: str) -> tuple[dict[str, list[Event]], list[list[Tensor]]]:
    with module.trace(path):
        found = play(module.run_method, SCRIPTS[name])
        assert not path.exists()
    return spans(path), found


def runs_of(events: list[Event]) -> dict[int, list[Event]]:
    runs: dict[int, list[Event]] = {}
    for event in events:
        runs.setdefault(event["args"]["run"], []).append(event)
    return runs


@pytest.mark.parametrize("delays_ns", [0, 200_000])
@pytest.mark.parametrize("setup", ["registered", "staged"])
@pytest.mark.parametrize("name", ["decoder", "chain", "gate"])
def test_the_spans_are_the_plans(
    name: str,
    setup: str,
    delays_ns: int,
    program_path: Callable[[str], Path],
    resident_bits: ResidentBits,
    tmp_path: Path,
) -> None:
    with at_the_floor(program_path(name), **SETUPS[setup]) as module:
        hooks(module).set_delays(5, delays_ns)
        lanes, found = traced(module, tmp_path / "trace.json", name)
        assert same(found, resident_bits(name))
        plan, program, total = module.plan, module.program, module.stats()
    assert plan is not None
    copies, steps = runs_of(lanes["copy"]), runs_of(lanes["compute"])
    assert sum(event["args"]["bytes"] for event in lanes["copy"]) == total.bytes_streamed
    owner = None
    for number, (method, _) in enumerate(SCRIPTS[name], start=1):
        planned, schedule = plan.method(method), program.method(method).schedule
        cold = owner != method
        owner = method
        # Every step once, in order, by its kernel's name.
        assert [event["args"]["index"] for event in steps[number]] == list(range(len(schedule.steps)))
        assert [event["name"] for event in steps[number]] == [step.kernel for step in schedule.steps]
        assert {event["args"]["method"] for event in steps[number]} == {method}
        # One span for every copy, by its weight's name; cold, those that enter the run come twice.
        expected = Counter(range(len(planned.copies)))
        if cold:
            expected += Counter(planned.prologue)
        assert Counter(event["args"]["index"] for event in copies[number]) == expected
        for event in copies[number]:
            piece = planned.copies[event["args"]["index"]].piece
            assert (event["name"], event["args"]["bytes"]) == (piece.weight, piece.nbytes)
        traffic = planned.cold if cold else planned.warm
        assert sum(event["args"]["bytes"] for event in copies[number]) == traffic.bytes_streamed
    assert set(copies) == set(steps) == set(range(1, len(SCRIPTS[name]) + 1))
    _check_order(plan, program, lanes, [method for method, _ in SCRIPTS[name]])


def _check_order(plan: Plan, program: Program, lanes: dict[str, list[Event]], methods: list[str]) -> None:
    """On the device's clock: a lane does one thing after the other, a copy ends before the first step that reads it
    begins (S2), and begins when the last reader of what was in its place has ended (S1)."""
    for events in lanes.values():
        for before, after in pairwise(events):
            assert _end(before) <= after["ts"] + CLOCK_US
    copies, steps = runs_of(lanes["copy"]), runs_of(lanes["compute"])
    for number, method in enumerate(methods, start=1):
        planned, schedule = plan.method(method), program.method(method).schedule
        cold = number == 1 or methods[number - 2] != method
        first_step = [schedule.first_step[access.number] for access in schedule.accesses]
        for position, placement in enumerate(planned.placements):
            if placement.stay is None:
                continue
            for index, copy in enumerate(planned.copies):
                if copy.stay != placement.stay:
                    continue
                # A copy that enters the run was made at its very start, or in the last run.
                enters = position < copy.issue_before
                run = number - 1 if enters and not cold else number
                made = _copies_of(copies[run], index)[0 if enters and cold else -1]
                assert _end(made) <= steps[number][first_step[position]]["ts"] + CLOCK_US, placement.weight
        for index, copy in enumerate(planned.copies):
            step_at_issue = [*first_step, len(schedule.steps)][copy.issue_before]
            if copy.wait_step is not None and copy.wait_step < step_at_issue:
                made = _copies_of(copies[number], index)[-1]
                assert _end(steps[number][copy.wait_step]) <= made["ts"] + CLOCK_US, copy.piece.weight


def _copies_of(events: list[Event], index: int) -> list[Event]:
    return [event for event in events if event["args"]["index"] == index]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def test_under_lru_the_spans_are_what_it_copied(decoder: Path, resident_bits: ResidentBits, tmp_path: Path) -> None:
    with at_the_floor(decoder, placement="lru") as module:
        lanes, found = traced(module, tmp_path / "trace.json", "decoder")
        assert same(found, resident_bits("decoder"))
        total, program = module.stats(), module.program
        model = LruModel(program, module.budget_bytes)
    copies, steps = runs_of(lanes["copy"]), runs_of(lanes["compute"])
    sizes = {weight.name: weight.nbytes for weight in program.weights}
    assert all(event["args"]["bytes"] == sizes[event["name"]] for event in lanes["copy"])
    assert (len(lanes["copy"]), sum(event["args"]["bytes"] for event in lanes["copy"])) == (
        total.copies,
        total.bytes_streamed,
    )
    for number, (method, _) in enumerate(SCRIPTS["decoder"], start=1):
        schedule = program.method(method).schedule
        assert len(copies[number]) == model.run(schedule).copies
        assert [event["args"]["index"] for event in steps[number]] == list(range(len(schedule.steps)))


def test_only_what_runs_while_it_is_open_is_in_a_trace(decoder: Path, tmp_path: Path) -> None:
    with at_the_floor(decoder) as module:
        run = Watched(module)
        play(run, SCRIPTS["decoder"])
        with module.trace(tmp_path / "first.json") as trace:
            play(run, SCRIPTS["decoder"][:2])
        trace.close()
        play(run, SCRIPTS["decoder"])
        with module.trace(str(tmp_path / "second.json")):
            play(run, SCRIPTS["decoder"][:3])
        first, second = spans(tmp_path / "first.json"), spans(tmp_path / "second.json")
        begin = len(SCRIPTS["decoder"]) + 1
        assert set(runs_of(first["compute"])) == {begin, begin + 1}
        assert set(runs_of(second["compute"])) == {2 * begin + 1, 2 * begin + 2, 2 * begin + 3}


def test_a_newer_trace_ends_the_one_before_it(decoder: Path, tmp_path: Path) -> None:
    """So one that an interrupt left on stands in nobody's way. Each file holds what ran while it recorded."""
    with at_the_floor(decoder) as module:
        with module.trace(tmp_path / "first.json"):
            play(module.run_method, SCRIPTS["decoder"][:1])
            with module.trace(tmp_path / "second.json"):
                play(module.run_method, SCRIPTS["decoder"][:2])
        assert set(runs_of(spans(tmp_path / "first.json")["compute"])) == {1}
        assert set(runs_of(spans(tmp_path / "second.json")["compute"])) == {2, 3}


def test_a_relative_path_is_what_it_was_when_the_trace_began(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = at_the_floor(decoder)
    module.trace("trace.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    module.close()
    assert (tmp_path / "trace.json").exists()
    assert not (tmp_path / "elsewhere" / "trace.json").exists()


def test_closing_the_module_writes_the_trace(decoder: Path, tmp_path: Path) -> None:
    module = at_the_floor(decoder)
    trace = module.trace(tmp_path / "trace.json")
    play(module.run_method, SCRIPTS["decoder"][:2])
    module.close()
    assert set(runs_of(spans(tmp_path / "trace.json")["compute"])) == {1, 2}
    trace.close()


def test_a_trace_that_cannot_be_written_is_told_and_the_module_still_closes(
    decoder: Path, tmp_path: Path, kept: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, folder = at_the_floor(decoder), tmp_path / "nowhere"
    # Before anything is recorded, as far as that is known then.
    for path in (folder / "trace.json", tmp_path):
        with pytest.raises(penstock.errors.OutputPathError, match=path.name):
            module.trace(path)
    folder.mkdir()
    with pytest.raises(penstock.errors.OutputPathError, match="nowhere"), module.trace(folder / "trace.json"):
        folder.rmdir()
        play(module.run_method, SCRIPTS["decoder"][:1])
    folder.mkdir()
    module.trace(folder / "trace.json")
    folder.rmdir()
    module.close()
    assert [(one.levelname, "trace.json" in one.getMessage()) for one in caplog.records] == [("ERROR", True)]
    with pytest.raises(penstock.errors.ClosedError):
        module.stats()


def test_a_failed_run_leaves_a_trace_that_can_be_read(decoder: Path, tmp_path: Path) -> None:
    with at_the_floor(decoder) as module:
        with module.trace(tmp_path / "trace.json"):
            play(module.run_method, SCRIPTS["decoder"][:1])
            assert module.plan is not None
            copies = module.plan.method("prefill").warm.copies
            assert copies > 6
            module.stats()
            hooks(module).fail_at(copies - 3, call="copy_to_device")
            with pytest.raises(PenstockError, match="a test asked for this failure"):
                play(module.run_method, SCRIPTS["decoder"][:1])
            module.reset_state()
            play(module.run_method, SCRIPTS["decoder"][:1])
        steps = runs_of(spans(tmp_path / "trace.json")["compute"])
        assert len(steps[2]) < len(steps[1]) == len(steps[3])


def test_another_budget_ends_a_trace(decoder: Path, tmp_path: Path) -> None:
    """Copies are named by the plan that made them."""
    with at_the_floor(decoder) as module:
        run = Watched(module)
        with module.trace(tmp_path / "trace.json"):
            play(run, SCRIPTS["decoder"][:1])
            module.set_budget(module.floor_bytes + 64 * PAGE)
            run.budget_changed()
            play(run, SCRIPTS["decoder"][:1])
        assert set(runs_of(spans(tmp_path / "trace.json")["copy"])) == {1}
        with module.trace(tmp_path / "trace.json"):
            play(run, SCRIPTS["decoder"][:1])
        assert set(runs_of(spans(tmp_path / "trace.json")["copy"])) == {3}


def test_a_module_with_an_open_trace_goes_with_its_last_reference(gate: Path, tmp_path: Path) -> None:
    """A trace does not hold its module: an interrupt between trace() and `with` leaves one open, and a collection of
    garbage must not be what gives the memory back."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        module = at_the_floor(gate)
        trace = module.trace(tmp_path / "open.json")
        play(module.run_method, SCRIPTS["gate"])
        alive = weakref.ref(module)
        del module
        assert alive() is None and trace.is_closed
        assert spans(tmp_path / "open.json")["compute"]
        trace.close()
    finally:
        if was_on:
            gc.enable()
