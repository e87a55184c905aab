"""State belongs to the module: shared by methods, there from load to close, and never half written without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import InputError, PenstockError, StateInvalidError
from penstock.verify.module import PoisonedModule
from tests.harness import bits
from tests.runtime.modules import (
    DECODER,
    EVERYTHING,
    GATE_WIDTH,
    PROMPT,
    SCRIPTS,
    SETUPS,
    Watched,
    at_the_floor,
    decode,
    hooks,
    other_values,
    play,
    prefill,
    rewrite_weights,
    same,
)

ResidentBits = Callable[[str], list[list[Tensor]]]
CACHES = [f"layers.{layer}.attn.{kind}_cache" for layer in range(DECODER.layers) for kind in "kv"]
FIRST_TOTAL = torch.arange(1.0, GATE_WIDTH + 1)


@pytest.mark.parametrize("setup", SETUPS)
def test_state_is_that_of_the_model_after_every_run(setup: str, decoder: Path) -> None:
    poisoned = PoisonedModule(decoder)
    with at_the_floor(decoder, **SETUPS[setup]) as module:
        run = Watched(module)
        for method, arguments in SCRIPTS["decoder"]:
            run(method, *arguments)
            poisoned.run_method(method, *arguments)
            for name in CACHES:
                assert torch.equal(bits(module.read_state(name)), bits(poisoned.states[name]))


def test_one_cache_for_both_methods(decoder: Path) -> None:
    with at_the_floor(decoder) as module:
        run = Watched(module)
        method, arguments = prefill()
        run(method, *arguments)
        filled = module.read_state(CACHES[0])
        assert filled[:, :, :PROMPT].abs().amin() > 0 and not filled[:, :, PROMPT:].any()
        method, arguments = decode(3, PROMPT)
        run(method, *arguments)
        grown = module.read_state(CACHES[0])
        assert torch.equal(grown[:, :, :PROMPT], filled[:, :, :PROMPT])
        assert grown[:, :, PROMPT].abs().amin() > 0 and not grown[:, :, PROMPT + 1 :].any()


def test_what_is_read_is_a_copy(gate: Path) -> None:
    with at_the_floor(gate) as module:
        module.read_state("total").fill_(9)
        before = module.read_state("total")
        assert torch.equal(before, FIRST_TOTAL)
        run = Watched(module)
        method, arguments = SCRIPTS["gate"][0]
        run(method, *arguments)
        assert torch.equal(before, FIRST_TOTAL)
        assert not torch.equal(module.read_state("total"), FIRST_TOTAL)


def test_what_is_written_is_what_the_next_run_reads(gate: Path, resident_bits: ResidentBits) -> None:
    with at_the_floor(gate) as module:
        run = Watched(module)
        value = torch.zeros(2 * GATE_WIDTH)[::2]
        found = play(run, SCRIPTS["gate"][:1])
        module.write_state("total", value)
        value.fill_(5)
        assert not module.read_state("total").any()
        assert not same(play(run, SCRIPTS["gate"][:1]), found)
        module.write_state("total", FIRST_TOTAL)
        assert same(play(run, SCRIPTS["gate"]), resident_bits("gate"))


def test_rows_are_put_into_another_order(gate: Path) -> None:
    """Of every state; and what does not fit is refused before anything moves."""
    with penstock.Module(gate, EVERYTHING) as module:
        value = torch.arange(GATE_WIDTH, dtype=torch.float32)
        module.write_state("total", value)
        rows = torch.arange(GATE_WIDTH).flip(0)
        module.select_state_rows(rows)
        assert torch.equal(module.read_state("total"), value.flip(0))
        for wrong in (rows[1:], rows.int(), rows + 1, rows[:, None]):
            with pytest.raises(InputError, match="rows are"):
                module.select_state_rows(wrong)
        assert torch.equal(module.read_state("total"), value.flip(0))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(GATE_WIDTH + 1), rf"float32\[{GATE_WIDTH + 1}\].*needs float32\[{GATE_WIDTH}\]"),
        (torch.zeros(1, GATE_WIDTH), rf"float32\[1, {GATE_WIDTH}\].*needs float32\[{GATE_WIDTH}\]"),
        (torch.zeros(GATE_WIDTH, dtype=torch.float64), rf"float64\[{GATE_WIDTH}\].*needs float32"),
        (1.0, "needs a tensor"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(value: object, message: str, gate: Path) -> None:
    with penstock.Module(gate, EVERYTHING) as module:
        with pytest.raises(InputError, match=message):
            module.write_state("total", value)  # type: ignore[arg-type]
        assert torch.equal(module.read_state("total"), FIRST_TOTAL)
        with pytest.raises(InputError, match="no state 'totals'; the program has total"):
            module.write_state("totals", FIRST_TOTAL)
        with pytest.raises(InputError, match="no state 'totals'; the program has total"):
            module.read_state("totals")


@pytest.mark.parametrize("setup", SETUPS)
def test_a_reset_puts_stored_first_values_back(setup: str, gate: Path, resident_bits: ResidentBits) -> None:
    with at_the_floor(gate, **SETUPS[setup]) as module:
        run = Watched(module)
        for _ in range(3):
            assert torch.equal(module.read_state("total"), FIRST_TOTAL)
            assert same(play(run, SCRIPTS["gate"]), resident_bits("gate"))
            assert not torch.equal(module.read_state("total"), FIRST_TOTAL)
            module.reset_state()


def test_first_values_come_with_the_weights_file(gate: Path, tmp_path: Path) -> None:
    program = PoisonedModule(gate).program
    other = rewrite_weights(program, gate.with_suffix(".ptd"), tmp_path / "other.ptd", value=other_values)
    with penstock.Module(gate, EVERYTHING, weights=other) as module:
        assert torch.equal(module.read_state("total"), FIRST_TOTAL * -0.5 + 0.01)


@pytest.mark.parametrize("setup", SETUPS)
def test_after_a_failed_run_state_is_unusable_until_reset(
    setup: str, decoder: Path, resident_bits: ResidentBits
) -> None:
    with at_the_floor(decoder, **SETUPS[setup]) as module:
        play(module.run_method, SCRIPTS["decoder"][:3])
        module.stats()  # waits: the call that fails below is one of the next run's
        hooks(module).fail_at(3, call="copy_to_device")
        method, arguments = decode(1, PROMPT)
        with pytest.raises(PenstockError, match="a test asked for this failure"):
            module.run_method(method, *arguments)
        unusable = r"may be half written: method 'decode' failed: .*a test asked for this failure.*reset_state\(\)"
        for use in (
            lambda: module.run_method(method, *arguments),
            lambda: module.run_method(*_flat(prefill())),
            lambda: module.read_state(CACHES[0]),
            lambda: module.write_state(CACHES[0], torch.zeros(1, 2, 32, 18)),
        ):
            with pytest.raises(StateInvalidError, match=unusable):
                use()
        module.reset_state()
        assert same(play(Watched(module), SCRIPTS["decoder"]), resident_bits("decoder"))


def test_a_run_that_fails_before_its_first_step_leaves_state_alone(decoder: Path) -> None:
    with at_the_floor(decoder) as module:
        run = Watched(module)
        found = play(run, SCRIPTS["decoder"][:2])
        before = [module.read_state(name) for name in CACHES]
        method, arguments = prefill()
        hooks(module).fail_at(1, call="copy_to_device")
        with pytest.raises(PenstockError, match="a test asked for this failure"):
            module.run_method(method, *arguments)
        run.run_failed()
        assert all(torch.equal(module.read_state(name), kept) for name, kept in zip(CACHES, before, strict=True))
        # As if the failed call had never been made.
        assert same(play(run, SCRIPTS["decoder"][1:2]), found[1:])


def test_a_refused_run_leaves_state_alone(gate: Path) -> None:
    with penstock.Module(gate, EVERYTHING) as module:
        with pytest.raises(InputError):
            module(torch.zeros(3, GATE_WIDTH))
        hooks(module).set_capturing(None, True)
        with pytest.raises(penstock.errors.CaptureError):
            module(torch.zeros(2, GATE_WIDTH))
        hooks(module).set_capturing(None, False)
        assert torch.equal(module.read_state("total"), FIRST_TOTAL)


def test_in_and_out_of_inference_mode(gate: Path, resident_bits: ResidentBits) -> None:
    with torch.inference_mode():
        module = at_the_floor(gate)
    with module:
        run = Watched(module)
        for inside in (True, False, True, False):
            with torch.inference_mode(inside):
                module.reset_state()
                module.write_state("total", module.read_state("total"))
                assert same(play(run, SCRIPTS["gate"]), resident_bits("gate"))


def test_modules_of_one_file_have_state_of_their_own(gate: Path, resident_bits: ResidentBits) -> None:
    with at_the_floor(gate) as one, at_the_floor(gate) as other:
        assert same(play(Watched(one), SCRIPTS["gate"]), resident_bits("gate"))
        assert torch.equal(other.read_state("total"), FIRST_TOTAL)
        assert same(play(Watched(other), SCRIPTS["gate"]), resident_bits("gate"))


def _flat(call: tuple[str, tuple[Tensor, ...]]) -> tuple[object, ...]:
    return call[0], *call[1]
