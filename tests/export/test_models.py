"""Real architectures, small and random: exported, compiled, and run under poison beside eager and all-resident."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import penstock
from penstock.plan.floor import floor_bytes
from penstock.plan.in_place import read_directly_by_default, stand_ins
from penstock.weights import read_index, verify_checksums
from tests.harness import bits, compare_runs, compiled, exact_floor_bytes, leaves, resident_twin
from tests.zoo import Case, decoder, export, hf, quantized, unet

pytest.importorskip("torchao")

CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: hf.llama(tied=True),
    "unet": lambda: unet.unet(channels_last=True),
    "qwen3_moe": hf.qwen3_moe,
    "qwen3_moe_grouped": lambda: hf.qwen3_moe(experts="grouped_mm", num_hidden_layers=1),
    "qwen3_moe_int4": lambda: quantized.quantized_qwen3_moe("int4"),
    "qwen3_moe_packed_int4": lambda: quantized.quantized_qwen3_moe("packed_int4", experts=True, num_hidden_layers=1),
    "decoder_int8": lambda: quantized.quantized_decoder("int8"),
    "bert": hf.bert,
    "vit": hf.vit,
    "t5": hf.t5,
}
# A decoder at each change; the others with the slow tests.
QUICK = ("llama",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_model(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    reference = copy.deepcopy(case.module)
    result = compiled(tmp_path, penstock.apply_weight_offload(export(case)))
    module = penstock_module(result)
    compare_runs(module, reference, case.args, runs=2)
    poisoned, kept = leaves(module(*case.args)), leaves(resident_twin(module)(*case.args))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(poisoned, kept, strict=True))
    # Not everything was lent at once, and never more than the floor allows where everything streams.
    peak_bytes = module.sessions["forward"].peak_bytes
    weights = {weight.name: weight for weight in result.program.weights}
    streamed = floor_bytes([method.schedule for method in result.program.methods], weights)
    assert 0 < peak_bytes <= streamed.floor_bytes < result.program.weight_bytes
    gathers = [a.weight for method in result.program.methods for a in method.schedule.accesses if a.gathered]
    assert bool(gathers) or exact_floor_bytes(result.program) == streamed.floor_bytes
    check_files(result)
    if name == "t5":
        (table,) = [w for w in result.program.weights if len(w.names) == 4]
        assert set(table.names) == {f"model.{n}.weight" for n in TIED_IN_T5}
    with penstock.Module(result.program_path, program_floor(result)) as at_the_floor:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(leaves(at_the_floor(*case.args)), kept, strict=True))
    if name == "qwen3_moe_int4":
        assert any(w.dtype == "uint8" for w in result.program.weights)


TIED_IN_T5 = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")


def penstock_module(result: penstock.Compiled):  # type: ignore[no-untyped-def]
    from penstock.verify.module import PoisonedModule

    return PoisonedModule(result.program_path)


def program_floor(result: penstock.Compiled) -> int:
    with penstock.Module(result.program_path, "1TiB") as module:
        return module.floor_bytes


def check_files(result: penstock.Compiled) -> None:
    program, index = result.program, read_index(result.weights_path)
    assert index.identity == program.identity
    assert [e.name for e in index.unique_entries if e.kind == "weight"] == [w.name for w in program.weights]
    verify_checksums(result.weights_path)
    assert exact_floor_bytes(program) <= program.floor_bytes == result.floor.floor_bytes


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_decoder_with_two_methods_and_a_cache(tmp_path: Path, tied: bool) -> None:
    config = decoder.DecoderConfig(tied=tied, layers=3)
    cases = decoder.methods(config)
    model = copy.deepcopy(cases["prefill"].module)
    result = compiled(tmp_path, {name: penstock.apply_weight_offload(export(case)) for name, case in cases.items()})
    module = penstock_module(result)
    twin = resident_twin(module)
    generator = torch.Generator().manual_seed(1)
    for seq in (8, 5, 20):
        calls = [("prefill", torch.randint(0, 256, (1, seq), generator=generator), torch.arange(seq))]
        calls += [
            ("decode", torch.randint(0, 256, (1, 1), generator=generator), torch.tensor([seq + i])) for i in range(3)
        ]
        for method, tokens, positions in calls:
            found = module.run_method(method, tokens, positions)
            with torch.no_grad():
                torch.testing.assert_close(found, model(tokens, positions))
            assert torch.equal(bits(found), bits(twin.run_method(method, tokens, positions)))
    # The cache is state: one buffer per name for both methods, outside of the weights, written by both.
    caches = {name for name, _ in model.named_buffers() if name.endswith("_cache")}
    assert {s.name for s in result.program.states} == caches
    assert all(s.init == "zeros" for s in result.program.states)
    for name, buffer in model.named_buffers():
        if name in caches:
            torch.testing.assert_close(module.states[name], buffer)
    # Every weight once, shared by the methods.
    expected = sum(p.numel() * p.element_size() for p in model.parameters()) + model.inv_freq.numel() * 4
    assert result.program.weight_bytes == expected
    assert result.weights_path.stat().st_size < expected + 4096 * (len(result.program.weights) + 8)
    check_files(result)
    prefill = result.program.method("prefill")
    assert set(prefill.signature.symbols.values()) == {(2, 32)}
    assert prefill.activation_bound_bytes is not None
    assert prefill.activation_bound_bytes > prefill.activation_example_bytes


@pytest.mark.slow
def test_llama_3_8b_floor_from_meta() -> None:
    """The figures of the design, from what the compiler would emit for the real shapes. Nothing is built."""
    from penstock.export.catalog import build_catalog, state_names
    from penstock.export.method import schedule_method

    case = decoder.methods(decoder.LLAMA3_8B, device="meta")["decode"]
    methods = {"decode": penstock.apply_weight_offload(export(case))}
    catalog = build_catalog(methods)
    names = {target: name for (_, target), name in catalog.name_of.items()}
    method = schedule_method("decode", methods["decode"], torch.device("cpu"), state_names(methods), names)

    assert sum(catalog.weights[n].nbytes for n in method.schedule.weight_names) == 16_060_522_752
    assert len(method.schedule.steps) > 32 * 9
    floor = floor_bytes([method.schedule], catalog.weights)
    table_bytes = 128256 * 4096 * 2
    assert 2 * table_bytes < floor.floor_bytes <= 2_230_000_000
    assert "head.weight" in floor.pair
    direct = floor_bytes([method.schedule], catalog.weights, direct=frozenset(["embed.weight"]))
    assert table_bytes < direct.floor_bytes <= 1_300_000_000
    assert floor_bytes(*stand_ins([method.schedule], catalog.weights, read_directly_by_default)) == direct
    # The cache is state, whatever its size: two tensors of each layer.
    assert sum(s.nbytes for s in catalog.states.values()) == 32 * 2 * 8 * 8192 * 128 * 2


def test_the_decoders_with_and_without_a_cache_agree() -> None:
    """What is compared with one of them is compared with the other."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    cached = decoder.build(cached=True)
    with torch.no_grad():
        want = decoder.build(cached=False)(tokens)
        got = [cached(tokens[:, :4], torch.arange(4))]
        got += [cached(tokens[:, i : i + 1], torch.tensor([i])) for i in (4, 5)]
    torch.testing.assert_close(torch.stack(got, dim=1), want[:, 3:], rtol=1e-4, atol=1e-5)
