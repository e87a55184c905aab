"""Mixtures of experts of transformers with some of their experts in slots: from a checkpoint, the prompt in groups and
200 tokens one by one, at the floor and above: bits, and hits and misses to the last."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.experts.reference import ReferenceTable
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint

# More experts than the families have elsewhere, so that slots change hands.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 12, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 12, "num_experts_per_tok": 3},
    "deepseek_v3": {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 2},
}
EXPERTS = 12
TOKENS = 200
PROMPT = 24
TEMPERATURE = 1.5


def replayed(model: Any, sequence: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Logits of transformers for tokens that are given; and by layer which experts each call asked for."""
    asked: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            calls = asked.setdefault(name, [])
            module.register_forward_pre_hook(lambda _, given, calls=calls: calls.append(given[1]))
    logits, cache, begin = [], None, 0
    with torch.no_grad():
        for end in range(PROMPT, PROMPT + TOKENS):
            out = model(sequence[:, begin:end], past_key_values=cache, use_cache=True)
            cache, begin = out.past_key_values, end
            logits.append(out.logits[:, -1])
    return logits, asked


def counted(asked: list[torch.Tensor], slots: int) -> tuple[int, int]:
    """Hits and misses of a cache that is written apart: the prompt in groups, and one token after the other."""
    table = ReferenceTable(EXPERTS, slots)
    prompt, *tokens = asked
    table.group(prompt.flatten().bincount(minlength=EXPERTS).tolist())
    for ids in tokens:
        table.take(ids.flatten().tolist())
    return table.hits, table.misses


@pytest.mark.parametrize("family", CHANGES)
def test_two_hundred_tokens_at_the_floor_and_three_budgets(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path / "checkpoint", **CHANGES[family], max_position_embeddings=512)
    prompt = torch.arange(PROMPT)[None] * 5 % 90 + 3
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": True, "top_k": 0}

    def generated(model: Any) -> Any:
        torch.manual_seed(0)
        return model.generate(
            prompt, **options, temperature=TEMPERATURE, output_scores=True, return_dict_in_generate=True
        )

    model = penstock.from_pretrained(
        folder,
        device="cpu",
        cache_length=PROMPT + TOKENS,
        prefill_tokens=PROMPT,
        cache_dir=tmp_path / "cache",
        inductor_configs=FAST,
        quiet=True,
    )
    with closing(model):
        module = model._engine.module
        full_bytes = module.full_bytes
        wanted = generated(model)
        assert module.stats().expert_misses == 0
        logits, asked = replayed(load_with_transformers(folder), wanted.sequences)
        for ours, theirs in zip(wanted.scores, logits, strict=True):
            # A token that ends the text is not sampled.
            theirs = torch.where(ours.isinf(), ours, theirs / TEMPERATURE)
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        experts = {one.weight for one in module.program.methods[0].schedule.accesses if one.routing is not None}
        for budget in (module.floor_bytes, full_bytes // 3, full_bytes // 2, full_bytes * 4 // 5):
            model.set_budget(max(budget, module.floor_bytes))
            before = module.stats()
            got = generated(model)
            assert torch.equal(got.sequences, wanted.sequences)
            assert all(torch.equal(one, other) for one, other in zip(got.scores, wanted.scores, strict=True))
            after, uses = module.stats(), module.expert_uses()
            # What is read as a whole has the memory first. Then experts have slots, or lie on the device whole.
            in_slots = {name for use in uses for name in use.weights}
            assert not (experts - in_slots) & set(module.plan.direct_weights) or (budget < full_bytes // 2 and not uses)
            crossed_bytes = 0
            for use, bank in zip(uses, module.plan.banks, strict=True):
                layer = next(name for name in asked if f"{name}." in use.weights[0])
                assert (use.hits, use.misses) == counted(asked[layer], use.slots) and use.calls == TOKENS
                crossed_bytes += use.misses * bank.row_bytes
            assert after.expert_bytes - before.expert_bytes == crossed_bytes
        assert module.plan.banks
