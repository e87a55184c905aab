"""Every model of the zoo exports, and the exported program computes what the eager model computes. No compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from . import Case, decoder, export, hf, quantized, unet

TIED = dataclasses.replace(decoder.TINY, tied=True)
BF16 = dataclasses.replace(decoder.TINY, dtype=torch.bfloat16)
# As wide as the real one, but quick to trace.
SHALLOW_8B = dataclasses.replace(decoder.LLAMA3_8B, layers=1)

CASES: dict[str, Callable[[], Case]] = {
    "prefill": lambda: decoder.methods()["prefill"],
    "decode": lambda: decoder.methods()["decode"],
    "prefill_tied": lambda: decoder.methods(TIED)["prefill"],
    "cache_free_bf16": lambda: decoder.cache_free(BF16),
    "llama_tied": lambda: hf.llama(tied=True),
    "qwen3_moe": hf.qwen3_moe,
    "qwen3_moe_grouped": lambda: hf.qwen3_moe(experts="grouped_mm", num_hidden_layers=1),
    "bert": hf.bert,
    "vit": hf.vit,
    "t5": hf.t5,
    "unet": unet.unet,
    "unet_channels_last": lambda: unet.unet(channels_last=True),
    "packed_int4_decode": lambda: quantized.quantized_methods("packed_int4")["decode"],
    "packed_int4_qwen3_moe": lambda: quantized.quantized_qwen3_moe("packed_int4", experts=True),
}
TORCHAO_CASES: dict[str, Callable[[], Case]] = {
    "int8": lambda: quantized.quantized_decoder("int8"),
    "int4": lambda: quantized.quantized_decoder("int4"),
    "int4_qwen3_moe": lambda: quantized.quantized_qwen3_moe("int4", experts=True, num_hidden_layers=1),
}
META_CASES: dict[str, Callable[[], Case]] = {
    "prefill": lambda: decoder.methods(SHALLOW_8B, device="meta")["prefill"],
    "decode": lambda: decoder.methods(SHALLOW_8B, device="meta")["decode"],
    "cache_free": lambda: decoder.cache_free(SHALLOW_8B, device="meta"),
    "packed_int4": lambda: quantized.quantized_methods("packed_int4", SHALLOW_8B, device="meta")["decode"],
    "llama": lambda: hf.llama(device="meta", dtype=torch.bfloat16, **{**hf.LLAMA_8B, "num_hidden_layers": 1}),
}


def run(module: Callable[..., Tensor | tuple[Tensor, ...]], case: Case) -> tuple[Tensor, ...]:
    # The exported module mutates the very cache buffers of the original, so both runs start from an empty cache.
    if isinstance(case.module, decoder.CachedDecoder):
        case.module.reset_cache()
    with torch.no_grad():
        out = module(*case.args)
    return (out,) if isinstance(out, Tensor) else tuple(out)


def check(case: Case) -> torch.export.ExportedProgram:
    program = export(case)
    # The same ATen operators on the same values: equal, not close.
    torch.testing.assert_close(run(program.module(), case), run(case.module, case), rtol=0, atol=0)
    return program


@pytest.mark.parametrize("name", CASES)
def test_exports(name: str) -> None:
    check(CASES[name]())


@pytest.mark.parametrize("name", TORCHAO_CASES)
def test_torchao_exports_and_flattens(name: str) -> None:
    pytest.importorskip("torchao")
    case = TORCHAO_CASES[name]()
    program = check(case).run_decompositions({})
    assert {type(t) for t in program.state_dict.values()} <= {Tensor, torch.nn.Parameter}
    torch.testing.assert_close(run(program.module(), case), run(case.module, case), rtol=0, atol=0)


@pytest.mark.parametrize("name", META_CASES)
def test_exports_on_meta(name: str) -> None:
    program = export(META_CASES[name]())
    assert {t.device.type for t in program.state_dict.values()} == {"meta"}


def test_methods_share_weights_and_cache() -> None:
    programs = [export(case) for case in decoder.methods().values()]
    first, second = ({**p.state_dict, **p.constants} for p in programs)
    assert first.keys() == second.keys()
    assert any(name.endswith("k_cache") for name in first)
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)


def test_cached_and_cache_free_agree() -> None:
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    cached = decoder.build(cached=True)
    with torch.no_grad():
        want = decoder.build(cached=False)(tokens)
        got = [cached(tokens[:, :4], torch.arange(4))]
        got += [cached(tokens[:, i : i + 1], torch.tensor([i])) for i in (4, 5)]
    torch.testing.assert_close(torch.stack(got, dim=1), want[:, 3:], rtol=1e-4, atol=1e-5)
