"""Whatever the budget, the policy and the host memory: a run gives the resident bits and moves the planned bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import BelowFloorError, IdentityError, InputError, PackageError
from penstock.plan.tuning import NOMINAL_COPY_LATENCY_S, NOMINAL_LINK_BYTES_PER_S
from penstock.runtime.module import POISON_VARIABLE
from penstock.verify.module import PoisonedModule
from tests.harness import bits, leaves
from tests.runtime.modules import (
    CHAIN_WIDTH,
    DECODER,
    EVERYTHING,
    GATE_WIDTH,
    SCRIPTS,
    SETUPS,
    KeptDrivers,
    Watched,
    at_the_floor,
    budgets,
    check_memory,
    decode,
    generate,
    hooks,
    other_values,
    play,
    prefill,
    random_input,
    rewrite_weights,
    same,
    traffic,
)

PROGRAMS = ["decoder", "chain", "gate"]
ProgramPath = Callable[[str], Path]
ResidentBits = Callable[[str], list[list[Tensor]]]


@pytest.mark.parametrize("name", [pytest.param("decoder", marks=pytest.mark.slow), "chain", "gate"])
def test_the_resident_run_is_the_run_with_private_copies_of_every_weight(
    name: str, program_path: ProgramPath, resident_bits: ResidentBits
) -> None:
    poisoned = PoisonedModule(program_path(name))
    assert same(play(poisoned.run_method, SCRIPTS[name]), resident_bits(name))


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_from_the_floor_to_everything(
    name: str, setup: str, program_path: ProgramPath, resident_bits: ResidentBits, kept: KeptDrivers
) -> None:
    with penstock.Module(program_path(name), EVERYTHING, **SETUPS[setup]) as full:
        asked = budgets(full)
    streamed: list[int] = []
    link_s: list[float] = []
    for budget in asked:
        with penstock.Module(program_path(name), budget, **SETUPS[setup]) as module:
            assert module.budget_bytes == budget
            run = Watched(module)
            assert same(play(run, SCRIPTS[name]), resident_bits(name))
            streamed.append(run.total.bytes_streamed)
            copies_s = run.total.copies * NOMINAL_COPY_LATENCY_S
            link_s.append(copies_s + run.total.bytes_streamed / NOMINAL_LINK_BYTES_PER_S)
    # More budget seldom keeps the link busy for longer, and then by little: planning is a search. The floor streams,
    # and everything streams nothing but lru's first loads.
    assert setup == "lru" or all(after <= 1.05 * before for before, after in pairwise(link_s))
    assert streamed[0] > streamed[-1]
    assert streamed[-1] == 0 or setup == "lru"


@pytest.mark.parametrize("late", [False, True], ids=["plain", "poison and delays"])
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hundred_runs_at_the_floor(
    name: str,
    setup: str,
    late: bool,
    program_path: ProgramPath,
    resident_bits: ResidentBits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if late:
        monkeypatch.setenv(POISON_VARIABLE, "1")
    with at_the_floor(program_path(name), **SETUPS[setup]) as module:
        hooks(module).set_delays(3 if late else 0, 20_000 if late else 0)
        run = Watched(module)
        while run.runs < 100:
            module.reset_state()
            assert same(play(run.run_on, SCRIPTS[name]), resident_bits(name))
        run.check()
        assert run.total.bytes_streamed > 100 * module.weight_bytes // 4


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_floor_is_exact(name: str, setup: str, program_path: ProgramPath, kept: KeptDrivers) -> None:
    path = program_path(name)
    with pytest.raises(BelowFloorError) as zero:
        penstock.Module(path, 0, **SETUPS[setup])
    floor = zero.value.floor_bytes
    assert zero.value.budget_bytes == 0
    if not SETUPS[setup]:
        assert penstock.read_program(path).floor_bytes == floor, "export and load name the same"
    with pytest.raises(
        BelowFloorError, match=rf"at least {floor} bytes; give {floor}, or weight_offload_budget_mb="
    ) as below:
        penstock.Module(path, floor - 1, **SETUPS[setup])
    assert (below.value.budget_bytes, below.value.floor_bytes) == (floor - 1, floor)
    with penstock.Module(path, floor, **SETUPS[setup]) as module:
        assert module.floor_bytes == module.budget_bytes == floor
        with pytest.raises(BelowFloorError, match=f"at least {floor} bytes") as changing:
            module.set_budget(floor - 1)
        assert ('placement="in-place" needs' in str(changing.value)) == (not SETUPS[setup])
        Watched(module)(*[SCRIPTS[name][0][0], *SCRIPTS[name][0][1]])


@pytest.mark.parametrize("setup", SETUPS)
def test_a_decoder_generates_the_same_tokens_at_the_floor(setup: str, decoder: Path) -> None:
    with penstock.Module(decoder, EVERYTHING) as resident:
        tokens, logits = generate(resident.run_method, 20)
        assert traffic(resident.stats()).bytes_streamed == 0
    assert len(set(tokens)) > 3
    with at_the_floor(decoder, **SETUPS[setup]) as module:
        run = Watched(module)
        found, rows = generate(run, 20)
        assert found == tokens and same([rows], [logits])
        assert module.last_run.bytes_streamed > module.budget_bytes // 2
        assert module.stats().runs == 21
        check_memory(module)


def test_direct_calls_and_methods(chain: Path, decoder: Path, resident_bits: ResidentBits) -> None:
    _, (x,) = SCRIPTS["chain"][0]
    with penstock.Module(chain) as module:
        for result in (module(x), module.forward(x), module.run_method("forward", x)):
            assert same([[bits(leaf) for leaf in leaves(result)]], resident_bits("chain")[:1])
            assert list(result) == ["hidden", "sum"]
        assert module.methods == ("forward",)
        with pytest.raises(PackageError, match="no method 'decode'; the program has forward"):
            module.run_method("decode", x)
        assert module.stats().runs == 3
        check_memory(module)
    with penstock.Module(decoder, EVERYTHING) as module:
        assert module.methods == ("prefill", "decode")
        with pytest.raises(PackageError, match="no method 'forward'; name one of prefill, decode"):
            module(x)


def test_what_a_module_says_of_itself(decoder: Path) -> None:
    with penstock.Module(decoder, EVERYTHING) as module:
        assert module.weight_bytes == sum(weight.nbytes for weight in module.program.weights)
        cache = DECODER.kv_heads * DECODER.max_len * DECODER.head_dim * 4
        assert module.state_bytes == 2 * DECODER.layers * cache
        assert module.floor_bytes < module.weight_bytes < module.budget_bytes
        assert module.host_bytes == decoder.with_suffix(".ptd").stat().st_size
        assert module.link_bytes_per_s is None
        module.set_budget(module.floor_bytes)
        assert module.link_bytes_per_s is not None and module.link_bytes_per_s > 0


# ---- inputs and outputs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((), "argument"),
        ((random_input(3, CHAIN_WIDTH), random_input(3, CHAIN_WIDTH)), "argument"),
        ((random_input(3, CHAIN_WIDTH + 1),), f"{CHAIN_WIDTH + 1}"),
        ((random_input(CHAIN_WIDTH),), "dimension"),
        ((random_input(3, CHAIN_WIDTH).double(),), "dtype float64, needs float32"),
        (([[1.0] * CHAIN_WIDTH],), ""),
        ((random_input(3, CHAIN_WIDTH).to("meta"),), "is on meta, needs to be on cpu"),
        ((random_input(3, CHAIN_WIDTH).requires_grad_(),), "requires grad"),
    ],
    ids=["too few", "too many", "size", "rank", "dtype", "not a tensor", "device", "grad"],
)
def test_inputs_that_do_not_fit_are_refused_with_the_signature(
    call: tuple[object, ...], message: str, chain: Path, resident_bits: ResidentBits
) -> None:
    with penstock.Module(chain) as module:
        run = Watched(module)
        with pytest.raises(InputError) as refused:
            module(*call)
        assert re.search(message, str(refused.value))
        assert re.search(rf"expected: forward\(x: float32\[\w+, {CHAIN_WIDTH}\]\) on cpu", str(refused.value))
        # Nothing was begun.
        assert module.stats().runs == 0
        assert same(play(run, SCRIPTS["chain"]), resident_bits("chain"))


def test_a_dynamic_size_outside_its_range_is_refused(decoder: Path) -> None:
    with penstock.Module(decoder, EVERYTHING) as module:
        for length in (1, DECODER.max_len + 1):
            method, arguments = prefill(length)
            with pytest.raises(InputError, match=rf"where 2 <= \w+ <= {DECODER.max_len}"):
                module.run_method(method, *arguments)
        assert module.stats().runs == 0


def test_an_input_that_requires_grad_is_taken_under_no_grad(chain: Path, resident_bits: ResidentBits) -> None:
    _, (x,) = SCRIPTS["chain"][0]
    with penstock.Module(chain) as module, torch.no_grad():
        result = module(x.clone().requires_grad_())
        assert same([[bits(leaf) for leaf in leaves(result)]], resident_bits("chain")[:1])
        assert not result["hidden"].requires_grad


def test_inputs_that_are_not_contiguous_give_the_same_bits(chain: Path, resident_bits: ResidentBits) -> None:
    _, (x,) = SCRIPTS["chain"][0]
    wide = torch.empty(x.shape[0], 2 * CHAIN_WIDTH + 1)
    strided, shifted = wide[:, :-1:2], wide.new_empty(x.numel() + 1)[1:].view(x.shape)
    strided.copy_(x)
    shifted.copy_(x)
    transposed = x.t().contiguous().t()
    with at_the_floor(chain) as module:
        run = Watched(module)
        for given in (strided, shifted, transposed):
            before = given.clone()
            assert same(play(run, [("forward", (given,))]), resident_bits("chain")[:1])
            assert torch.equal(given, before)


def test_outputs_are_the_callers_own(gate: Path, chain: Path) -> None:
    x = random_input(2, GATE_WIDTH)
    with penstock.Module(gate, EVERYTHING) as module:
        first = module(x)
        kept_bits = bits(first)
        module.reset_state()
        again = module(x)
        assert torch.equal(bits(first), kept_bits) and torch.equal(bits(again), kept_bits)
        again.fill_(7)
        assert not torch.equal(module.read_state("total"), torch.full((GATE_WIDTH,), 7.0))
        module.reset_state()
        assert torch.equal(bits(module(x)), kept_bits)
    _, (x,) = SCRIPTS["chain"][0]
    with at_the_floor(chain) as module:
        results = [module(x) for _ in range(3)]
        kept_bits = bits(results[1]["hidden"])
        results[0]["hidden"].fill_(7)
        results[0]["sum"].fill_(7)
        assert torch.equal(bits(module(x)["hidden"]), kept_bits)
    # Outputs live on when the module is gone.
    assert torch.equal(bits(results[1]["hidden"]), bits(results[2]["hidden"]))


# ---- other weights


@pytest.mark.parametrize("setup", SETUPS)
def test_other_weights_give_the_other_models_results(
    setup: str, decoder: Path, tmp_path: Path, resident_bits: ResidentBits
) -> None:
    source = decoder.with_suffix(".ptd")
    tuned = tmp_path / "tuned.ptd"
    rewrite_weights(PoisonedModule(decoder).program, source, tuned, value=other_values)
    expected = play(PoisonedModule(decoder, tuned).run_method, SCRIPTS["decoder"])
    assert not any(same([a], [b]) for a, b in zip(expected, resident_bits("decoder"), strict=True))
    for weights in (tuned, str(tuned)):
        with at_the_floor(decoder, weights=weights, **SETUPS[setup]) as module:
            assert same(play(Watched(module), SCRIPTS["decoder"]), expected)


def test_the_weights_of_another_program_are_refused(decoder: Path, chain: Path, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="holds none of the .* weights of the program"):
        penstock.Module(decoder, EVERYTHING, weights=chain.with_suffix(".ptd"))
    program = PoisonedModule(decoder).program
    foreign = rewrite_weights(
        program, decoder.with_suffix(".ptd"), tmp_path / "foreign.ptd", identity=PoisonedModule(chain).program.identity
    )
    with pytest.raises(IdentityError, match=f"the program needs {program.identity}"):
        penstock.Module(decoder, EVERYTHING, weights=foreign)


def test_decode_reads_the_cache_that_prefill_filled(decoder: Path) -> None:
    """Through memory that both methods share, whatever streams in between."""
    with at_the_floor(decoder) as module:
        run = Watched(module)
        rows = []
        for length in (8, 5):
            module.reset_state()
            method, arguments = prefill(length)
            run(method, *arguments)
            method, arguments = decode(3, 8)
            rows.append(bits(run(method, *arguments)))
        assert not torch.equal(*rows)
