"""A decoder with the split cache generates what it does with the plain one, at every split."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from examples import decoder

import penstock
from penstock.export.catalog import build_catalog, state_names
from penstock.export.weightless import make_weightless
from penstock.kv import ops
from tests.kv.decoder import SplitDecoder, cache_of, generate, generate_plain

CFG = dataclasses.replace(decoder.TINY, max_len=150)
PROMPTS = [[(n * n + 3) % 251 for n in range(125)], [250, 1], [n % 7 + 60 for n in range(60)]]
AMOUNT = 10


@pytest.fixture(scope="module")
def plain() -> decoder.CachedDecoder:
    return decoder.build(CFG, cached=True, seed=1)


@pytest.fixture(scope="module")
def expected(plain: decoder.CachedDecoder) -> list[list[int]]:
    tokens = [generate_plain(plain, prompt, AMOUNT) for prompt in PROMPTS]
    assert len({tuple(t) for t in tokens}) == len(PROMPTS), "sequences that are alike show little"
    return tokens


@pytest.mark.parametrize("near", [0, 64, 128, CFG.max_len])
def test_the_same_tokens_at_every_split(plain: decoder.CachedDecoder, expected: list[list[int]], near: int) -> None:
    model = SplitDecoder(plain, cache_of(CFG, len(PROMPTS), near))
    found = generate(model, PROMPTS, AMOUNT, chunk=40 if near % 128 else 125)
    assert [tokens[:AMOUNT] for tokens in found] == expected


def test_an_exported_decoder_generates_the_same(plain: decoder.CachedDecoder, expected: list[list[int]]) -> None:
    """One program for prefill and decode; the cache's buffers are its state."""
    model = SplitDecoder(plain, cache_of(CFG, len(PROMPTS), 64))
    batch = len(PROMPTS)
    example = (torch.zeros(batch, 4, dtype=torch.long), torch.zeros(batch, dtype=torch.int32), torch.ones(batch).int())
    seq = torch.export.Dim("seq", min=1, max=CFG.max_len)
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=({1: seq}, None, None))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(ops.APPEND) == called.count(ops.ATTEND) == CFG.layers
    found = generate(model, PROMPTS, AMOUNT, 40, run=program.module())
    assert [tokens[:AMOUNT] for tokens in found] == expected
    assert model.cache.host_kv_0.any(), "the program's state is the cache's own memory, which may be registered"
    # And functionalized, as compilers want it, both sides are state that the program mutates.
    with torch.no_grad():
        mutated = set(program.run_decompositions({}).graph_signature.buffers_to_mutate.values())
    assert mutated == {f"cache.{side}kv_{layer}" for side in ("", "host_") for layer in range(CFG.layers)}


def test_for_a_gpu_it_becomes_a_program_whose_far_sides_are_marked(plain: decoder.CachedDecoder) -> None:
    """As far as that goes without one: up to what the compiler is given."""
    model = SplitDecoder(plain, cache_of(CFG, 1, 64)).requires_grad_(False)
    example = (torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, dtype=torch.int32), torch.ones(1).int())
    methods = {"forward": penstock.apply_weight_offload(torch.export.export(model, example))}
    states = build_catalog(methods).states
    assert {name for name, state in states.items() if state.host} == {"cache.host_kv_0", "cache.host_kv_1"}
    program = make_weightless(methods["forward"], torch.device("cuda", 0), state_names(methods))
    assert set(program.states) == set(states)
    assert {value.device.type for value in program.example_inputs} == {"cuda"}
