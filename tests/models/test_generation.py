"""Families compiled, and transformers' own generate() over them: its tokens and its scores, at the floor and above."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import ModelError
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint

# One of each kind: dense, windows, chunks, learned positions, ALiBi, experts, latent attention, sinks, recurrent, both.
COMPILED = [
    *("bloom", "deepseek_v3", "falcon_h1", "gemma3_text", "gpt2", "gpt_oss", "lfm2", "llama4_text", "mamba2"),
    *("mixtral", "opt", "phi3", "qwen3_moe"),
]
BATCH, LENGTH, PIECE = 2, 64, 24
NEW_TOKENS = 12
# With these weights it copies what it was given, so that candidates are right.
REPEATING = {"Gemma3ForCausalLM"}


def _prompt(rows: int, count: int, seed: int = 3) -> Tensor:
    return torch.randint(3, 500, (rows, count), generator=torch.Generator().manual_seed(seed))


def _same(reference: Any, model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """Tokens and scores of both, with the same seed."""
    made = []
    for each in (reference, model):
        torch.manual_seed(0)
        made.append(
            each.generate(
                ids,
                attention_mask=torch.ones_like(ids) if mask is None else mask,
                max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True,
                output_scores=True,
                **{"do_sample": False, **options},
            )
        )
    want, got = made
    assert torch.equal(want.sequences, got.sequences), options
    for ours, theirs in zip(got.scores, want.scores, strict=True):
        finite = torch.isfinite(theirs)
        assert torch.equal(finite, torch.isfinite(ours))
        assert (ours - theirs)[finite].abs().max() < 1e-4 * theirs[finite].std().clamp(min=1)
    return got


def _distinct(sequences: Tensor, prompt: int) -> int:
    return len(set(sequences[:, prompt:].flatten().tolist()))


@pytest.mark.parametrize("family", COMPILED)
def test_generation_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path / "checkpoint")
    reference = load_with_transformers(folder)
    model = penstock.from_pretrained(
        folder,
        cache_length=LENGTH,
        batch=BATCH,
        device="cpu",
        cache_dir=tmp_path / "cache",
        prefill_tokens=PIECE,
        inductor_configs=FAST,
        quiet=True,
    )
    try:
        assert type(model).__name__ == type(reference).__name__ and isinstance(model, type(reference))
        assert model.floor_bytes < model.weight_bytes
        once = None
        for budget in (model.floor_bytes, (model.floor_bytes + model.weight_bytes) // 2):
            model.set_budget(budget)
            repeated = _prompt(1, 6).repeat(1, 3)
            greedy = _same(reference, model, repeated)
            sampled = _same(reference, model, repeated, do_sample=True, top_k=0, temperature=1.5)
            assert _distinct(sampled.sequences, 18) > NEW_TOKENS // 2, "one token over and over would show nothing"
            # Longer than one piece.
            _same(reference, model, _prompt(1, PIECE + 9))
            _same(reference, model, _prompt(1, 1))
            _same(reference, model, _prompt(2, 7))
            _same(reference, model, repeated, num_beams=2)
            _lookup_or_refusal(reference, model, repeated)
            _padding_or_refusal(reference, model)
            if once is not None:
                assert all(torch.equal(a, b) for a, b in zip(once.scores, greedy.scores, strict=True))
            once = greedy
        assert model.last_run.bytes_streamed > 0 or budget > model.floor_bytes
    finally:
        model.close()


def _lookup_or_refusal(reference: Any, model: Any, ids: Tensor) -> None:
    engine = model._engine
    if engine.is_recurrent or engine.has_experts:
        # Of models that it calls stateful transformers says so itself, before it asks.
        refusal = "does not take prompt lookup or an assistant|assisted generation is not supported with stateful"
        with pytest.raises((ModelError, ValueError), match=refusal):
            model.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=3)
        return
    before = model.stats().runs
    _same(reference, model, ids, prompt_lookup_num_tokens=3)
    if type(model).__name__ in REPEATING:
        assert model.stats().runs - before <= NEW_TOKENS // 2


def _padding_or_refusal(reference: Any, model: Any) -> None:
    ids = _prompt(2, 9)
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    if model._engine.is_recurrent:
        with pytest.raises(ModelError, match="give rows of equal length"):
            model.generate(ids, attention_mask=mask, max_new_tokens=4)
        return
    _same(reference, model, ids, mask)
