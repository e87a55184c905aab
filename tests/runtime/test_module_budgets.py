"""Where a module's budget comes from, what is said about it, and how it changes while the module is open."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.budget import format_bytes
from penstock.errors import BelowFloorError, BudgetError, DeviceMemoryError, PackageError, PenstockError, RuntimeFailure
from penstock.runtime.automatic_budget import reserve_bytes
from penstock.runtime.driver import Driver, Memory
from tests.native.session import uninstall
from tests.runtime.modules import (
    CHAIN_BAKED_BYTES,
    EVERYTHING,
    PAGE,
    SCRIPTS,
    SETUPS,
    KeptDrivers,
    Watched,
    at_the_floor,
    budgets,
    check_memory,
    floor_of,
    hooks,
    play,
    same,
)

ResidentBits = Callable[[str], list[list[Tensor]]]
GIB = 2**30


def loaded_with(path: Path, *arguments: Any, **options: Any) -> tuple[int, str]:
    """The budget that holds, and where it came from by the summary; after a run that was held to it."""
    with penstock.Module(path, *arguments, **options) as module:
        run = Watched(module)
        method, inputs = SCRIPTS["chain" if "forward" in module.methods else "decoder"][0]
        run(method, *inputs)
        run(method, *inputs)
        origin = re.search(r"\((given at load|baked at export|automatic)\)", module.summary)
        assert origin
        return module.budget_bytes, origin[1]


# ---- forms


def test_forms_of_a_budget(decoder: Path) -> None:
    floor = floor_of(decoder)
    middle = floor + 100_000
    for given in (middle, str(middle), f" {middle} ", f"{middle}B"):
        assert loaded_with(decoder, given) == (middle, "given at load")
    assert loaded_with(decoder, "240KiB") == (240 * 1024, "given at load")
    assert loaded_with(decoder, budget="240KiB") == (240 * 1024, "given at load")
    with penstock.Module(decoder, EVERYTHING) as module:
        full = module.budget_bytes
    for large in (8 * GIB, "8GiB", "8589934592", str(2**62), "9.5 TiB"):
        assert loaded_with(decoder, large) == (full, "given at load")
    assert loaded_with(decoder, weight_offload_budget_mb=1) == (full, "given at load")
    assert loaded_with(decoder, weight_offload_budget_mb=2**40) == (full, "given at load")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (-1, "-1 is negative"),
        ("-1", "'-1' is negative"),
        ("lots", "'lots' is not a number of bytes"),
        ("8 gigs", "unit 'gigs', which is unknown"),
        ("1.3B", "not a whole number"),
        ("", "'' is not a number of bytes"),
        ("nan", "'nan' is not a number of bytes"),
        (float("nan"), "nan is of type float"),
        (1e9, "is of type float"),
        (True, "True is a bool"),
        (2**63, "is more than"),
    ],
)
def test_what_is_no_budget_is_refused_by_name(given: Any, message: str, decoder: Path, kept: KeptDrivers) -> None:
    with pytest.raises(BudgetError, match=message):
        penstock.Module(decoder, given)
    with penstock.Module(decoder, EVERYTHING) as module:
        before = module.budget_bytes
        with pytest.raises(BudgetError, match=message):
            module.set_budget(given)
        assert module.budget_bytes == before
        Watched(module)(*_first("decoder"))


@pytest.mark.parametrize("given", [-1, True, 1.5, "1", 2**50])
def test_what_is_no_number_of_mb_is_refused_by_name(given: Any, decoder: Path, kept: KeptDrivers) -> None:
    with pytest.raises(BudgetError, match=rf"weight_offload_budget_mb is {given!r}"):
        penstock.Module(decoder, weight_offload_budget_mb=given)


def test_nothing_parses_and_meets_the_floor(decoder: Path, kept: KeptDrivers) -> None:
    floor = floor_of(decoder)
    for none in ({"budget": 0}, {"budget": "0"}, {"budget": "0GiB"}, {"weight_offload_budget_mb": 0}):
        with pytest.raises(BelowFloorError, match=f"at least {floor} bytes") as below:
            penstock.Module(decoder, **none)
        assert (below.value.budget_bytes, below.value.floor_bytes) == (0, floor)


def test_a_plan_is_asked_for_with_every_form_of_a_budget(decoder: Path) -> None:
    with penstock.Module(decoder, EVERYTHING) as module:
        budget = module.floor_bytes + PAGE
        assert module.plan_at(f"{budget} B") == module.plan_at(str(budget)) == module.plan_at(budget) != module.plan
        with pytest.raises(BudgetError, match="'much' is not a number of bytes"):
            module.plan_at("much")


def test_two_budgets_are_refused(decoder: Path, kept: KeptDrivers) -> None:
    with pytest.raises(BudgetError, match="weight_offload_budget_mb= does not go with budget=: .*; pass one"):
        penstock.Module(decoder, "1GiB", weight_offload_budget_mb=512)


def test_a_budget_for_a_program_without_offload_metadata_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(1, 4),)), plain)
    for given in ({"budget": "8GiB"}, {"weight_offload_budget_mb": 512}):
        with pytest.raises(BudgetError, match=r"was given for .*plain.pt2, which has no offload metadata"):
            penstock.Module(plain, **given)
    with pytest.raises(PackageError, match="is not a weightless program"):
        penstock.Module(plain)


# ---- precedence


def test_the_value_at_load_then_the_baked_one_then_an_automatic_one(chain: Path, decoder: Path) -> None:
    assert loaded_with(chain) == (CHAIN_BAKED_BYTES, "baked at export")
    assert loaded_with(chain, "480KiB") == (480 * 1024, "given at load")
    assert loaded_with(decoder)[1] == "automatic"
    assert loaded_with(decoder, "auto")[1] == "automatic"


def test_a_baked_budget_can_be_overruled_by_an_automatic_one(chain: Path, kept: KeptDrivers) -> None:
    """Asking for "auto" is asking: this program has no bound for it, and its baked value is not taken instead."""
    with pytest.raises(
        BudgetError,
        match=r"no automatic budget, and no device_memory, for method 'forward'.*of input 'x' has no highest value",
    ):
        penstock.Module(chain, "auto")


def test_the_automatic_budget_is_what_is_free_less_what_a_run_needs(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.Module(decoder, EVERYTHING) as module:
        program, full = module.program, module.budget_bytes
    floor = floor_of(decoder)
    activations = max(method.activation_bound_bytes or 0 for method in program.methods)
    taken = activations + program.state_bytes + reserve_bytes(torch.device("cpu"), GIB)
    for left, budget in ((floor, floor), (floor + 5 * PAGE, floor + 5 * PAGE), (GIB, full)):
        monkeypatch.setattr(Driver, "memory", lambda self, left=left: Memory(taken + left, GIB))
        assert loaded_with(decoder) == (budget, "automatic")
    monkeypatch.setattr(Driver, "memory", lambda self: Memory(taken + floor - 1, GIB))
    with pytest.raises(BelowFloorError) as below:
        penstock.Module(decoder, "auto")
    assert (below.value.budget_bytes, below.value.floor_bytes) == (floor - 1, floor)
    for term in (
        f"free {format_bytes(taken + floor - 1)} ",
        f"- activations {format_bytes(activations)} ",
        f"- state {format_bytes(program.state_bytes)} ",
        f"- reserve {format_bytes(reserve_bytes(torch.device('cpu'), GIB))}",
        f"at least {floor} bytes",
        "1 B more",
    ):
        assert term in str(below.value)


def test_an_automatic_change_counts_what_the_module_itself_holds(
    decoder: Path, monkeypatch: pytest.MonkeyPatch, resident_bits: ResidentBits
) -> None:
    with at_the_floor(decoder) as module:
        activations = max(method.activation_bound_bytes or 0 for method in module.program.methods)
        reserve = reserve_bytes(torch.device("cpu"), GIB)
        run = Watched(module)
        for more in (5 * PAGE, 9 * PAGE):
            held = module.device_memory()[0]
            free = module.floor_bytes + more - held + activations + reserve
            monkeypatch.setattr(Driver, "memory", lambda self, free=free: Memory(free, GIB))
            with pytest.raises(BudgetError, match="None"):
                module.set_budget(None)  # type: ignore[arg-type]
            module.set_budget("auto")
            run.budget_changed()
            assert module.budget_bytes == module.floor_bytes + more
            module.reset_state()
            assert same(play(run, SCRIPTS["decoder"]), resident_bits("decoder"))


# ---- what is said


def said(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in log.records if record.name == "penstock"]


def test_one_line_at_load_and_one_per_change(
    decoder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    floor = floor_of(decoder)
    caplog.set_level("INFO", "penstock")
    with penstock.Module(decoder, floor) as module:
        ((level, line),) = said(caplog)
        assert (level, line) == ("INFO", module.summary)
        caplog.clear()
        assert module.plan is not None
        for part in (
            "model.pt2 on cpu: floor ",
            "(given at load)",
            "resident ",
            "ring ",
            "per run of prefill",
            "per run of decode",
            " GB/s",
        ):
            assert part in line
        module.run_method(*_first("decoder"))
        assert not said(caplog)
        module.set_budget(floor + PAGE)
        assert said(caplog) == [("INFO", module.summary)]
        caplog.clear()
        module.set_budget("8GiB")
        (_, summary), (_, clamp) = said(caplog)
        assert summary == module.summary and "no copies" in summary
        assert "8 GiB" in clamp and "(given to set_budget)" in clamp
    assert capsys.readouterr() == ("", ""), "the logger is all"


def test_a_module_prints_nothing_unless_logging_is_set_up(decoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setup in SETUPS.values():
        with penstock.Module(decoder, "8GiB", **setup) as module:
            module.set_budget(module.floor_bytes)
            module.run_method(*_first("decoder"))
    assert capsys.readouterr() == ("", "")


# ---- changing it


@pytest.mark.parametrize("setup", SETUPS)
def test_a_budget_goes_up_and_down(setup: str, decoder: Path, resident_bits: ResidentBits, kept: KeptDrivers) -> None:
    with penstock.Module(decoder, EVERYTHING, **SETUPS[setup]) as module:
        low, *middle, full = budgets(module)
    with penstock.Module(decoder, low, **SETUPS[setup]) as module:
        run = Watched(module)
        most = low
        for budget in (low, middle[0], middle[1], low, middle[2], middle[0], full, low):
            most = max(most, budget)
            module.set_budget(budget)
            run.budget_changed()
            assert module.budget_bytes == budget
            module.reset_state()
            assert same(play(run, SCRIPTS["decoder"]), resident_bits("decoder"))
            # Never more than the larger of the two, by the driver's own count.
            assert module.device_memory()[1] <= most
            assert hooks(module).counts().peak_block_bytes <= most
        assert run.runs == module.stats().runs == 8 * len(SCRIPTS["decoder"])


@pytest.mark.parametrize("setup", SETUPS)
def test_state_and_outputs_survive_a_change_of_budget(setup: str, decoder: Path, resident_bits: ResidentBits) -> None:
    """In the middle of a sequence, and with a copy for the next run under way."""
    with penstock.Module(decoder, EVERYTHING, **SETUPS[setup]) as module:
        asked = budgets(module)
    with penstock.Module(decoder, asked[0], **SETUPS[setup]) as module:
        run = Watched(module)
        found = []
        for number, call in enumerate(SCRIPTS["decoder"]):
            found += play(run.run_on, [call])
            module.set_budget(asked[number % len(asked)])
            run.budget_changed()
        assert same(found, resident_bits("decoder"))
        assert module.stats().bytes_streamed == run.total.bytes_streamed
        check_memory(module, max(asked))


@pytest.mark.parametrize("setup", SETUPS)
def test_below_the_floor_a_change_is_refused_and_nothing_changes(
    setup: str, decoder: Path, resident_bits: ResidentBits
) -> None:
    with at_the_floor(decoder, **SETUPS[setup]) as module:
        run = Watched(module)
        play(run, SCRIPTS["decoder"])
        with pytest.raises(BelowFloorError) as below:
            module.set_budget(module.floor_bytes - 1)
        assert below.value.floor_bytes == module.floor_bytes == module.budget_bytes
        # What was in place still is: the next run of the same method is a warm one.
        method, arguments = SCRIPTS["decoder"][-1]
        run(method, *arguments)
        module.reset_state()
        assert same(play(run, SCRIPTS["decoder"]), resident_bits("decoder"))


@pytest.mark.parametrize(
    ("setup", "call", "kind"),
    [
        ("registered", "create_block", DeviceMemoryError),
        ("registered", "map", RuntimeFailure),
        ("registered", "copy_to_device", RuntimeFailure),
        ("staged", "create_event", RuntimeFailure),
        ("lru", "create_pool", DeviceMemoryError),
        ("lru", "pool_allocate", DeviceMemoryError),
    ],
)
def test_a_plan_that_cannot_be_installed_leaves_the_old_one(
    setup: str, call: str, kind: type[PenstockError], decoder: Path, resident_bits: ResidentBits, kept: KeptDrivers
) -> None:
    with penstock.Module(decoder, EVERYTHING, **SETUPS[setup]) as module:
        _, lower, upper, *_ = budgets(module)
    with penstock.Module(decoder, lower, **SETUPS[setup]) as module:
        run = Watched(module)
        play(run, SCRIPTS["decoder"])
        hooks(module).fail_at(2 if call in ("create_block", "map") else 1, call=call)
        with pytest.raises(kind, match="a test asked for this failure"):
            module.set_budget(upper)
        assert hooks(module).failed_call() == call
        assert module.budget_bytes == lower
        run.budget_changed(tried_bytes=upper)
        module.reset_state()
        assert same(play(run, SCRIPTS["decoder"]), resident_bits("decoder"))
        module.set_budget(upper)
        run.budget_changed()
        module.reset_state()
        assert same(play(run, SCRIPTS["decoder"]), resident_bits("decoder"))


def test_when_the_old_plan_cannot_be_put_back_the_module_is_closed(decoder: Path, kept: KeptDrivers) -> None:
    with penstock.Module(decoder, EVERYTHING) as module:
        full = module.budget_bytes
    # Room for the old plan until it is given up, and for no other afterwards.
    kept.capacity_bytes = full
    module = penstock.Module(decoder, full)
    blocker: list[int] = []
    install = module._session.install

    def install_and_fill_up(numbers: Any) -> None:
        if not blocker:
            uninstall(module._session)
            blocker.append(kept.last.create_block(full))
        install(numbers)

    module._session.install = install_and_fill_up  # type: ignore[method-assign]
    with pytest.raises(RuntimeFailure, match="neither the new budget .* nor the old one .* the module is closed"):
        module.set_budget(module.floor_bytes)
    with pytest.raises(penstock.errors.ClosedError):
        module.run_method(*_first("decoder"))
    module.close()
    kept.last.release_block(blocker[0])


def _first(name: str) -> tuple[Any, ...]:
    method, arguments = SCRIPTS[name][0]
    return method, *arguments
