"""transformers' own generate() on a model of Penstock beside the model that transformers loads: tokens and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import ModelError
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint

BATCH, LENGTH, PIECE = 2, 64, 24
NEW_TOKENS = 12
# With these weights it copies what it was given, so that candidates are right.
REPEATING = {"Gemma3ForCausalLM"}


def prompt(rows: int, count: int, seed: int = 3) -> Tensor:
    return torch.randint(3, 500, (rows, count), generator=torch.Generator().manual_seed(seed))


def same(reference: Any, model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
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


def compare_generation(family: str, scratch: Path, device: str, **changes: Any) -> Any:
    """At the floor and above it; what the last run at the floor did."""
    folder = save_checkpoint(family, scratch / "checkpoint", **changes)
    reference = load_with_transformers(folder).to(device)
    model = penstock.from_pretrained(
        folder,
        cache_length=LENGTH,
        batch=BATCH,
        device=device,
        cache_dir=scratch / "cache",
        prefill_tokens=PIECE,
        inductor_configs=FAST,
        quiet=True,
    )
    try:
        assert type(model).__name__ == type(reference).__name__ and isinstance(model, type(reference))
        once = at_floor = None
        for budget in (model.floor_bytes, (model.floor_bytes + max(model.floor_bytes, model.weight_bytes)) // 2):
            model.set_budget(budget)
            repeated = prompt(1, 6).repeat(1, 3).to(device)
            greedy = same(reference, model, repeated)
            sampled = same(reference, model, repeated, do_sample=True, top_k=0, temperature=1.5)
            assert _distinct(sampled.sequences, 18) > NEW_TOKENS // 2, "one token over and over would show nothing"
            # Longer than one piece.
            same(reference, model, prompt(1, PIECE + 9).to(device))
            same(reference, model, prompt(1, 1).to(device))
            same(reference, model, prompt(2, 7).to(device))
            same(reference, model, repeated, num_beams=2)
            _lookup_or_refusal(reference, model, repeated)
            _padding_or_refusal(reference, model, device)
            if once is None:
                once, at_floor = greedy, model.last_run
            assert all(torch.equal(a, b) for a, b in zip(once.scores, greedy.scores, strict=True))
        return at_floor
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
    same(reference, model, ids, prompt_lookup_num_tokens=3)
    if type(model).__name__ in REPEATING:
        assert model.stats().runs - before <= NEW_TOKENS // 2


def _padding_or_refusal(reference: Any, model: Any, device: str) -> None:
    ids = prompt(2, 9).to(device)
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    if model._engine.is_recurrent:
        with pytest.raises(ModelError, match="give rows of equal length"):
            model.generate(ids, attention_mask=mask, max_new_tokens=4)
        return
    same(reference, model, ids, mask)
