"""Mixtures of experts of transformers with some of their experts in slots: from a checkpoint, the prompt in groups and
200 tokens one by one, at the floor and above."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint

# More experts than the families have elsewhere, so that slots change hands.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 12, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 12, "num_experts_per_tok": 3},
    "deepseek_v3": {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 2},
}
TOP = 3
TOKENS = 200
PROMPT = 24


@pytest.mark.parametrize("family", CHANGES)
def test_two_hundred_tokens_at_the_floor_and_three_budgets(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path / "checkpoint", **CHANGES[family], max_position_embeddings=512)
    prompt = torch.arange(PROMPT)[None] * 5 % 90 + 3
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": True, "temperature": 1.5, "top_k": 0}

    def generated(model: Any) -> Any:
        torch.manual_seed(0)
        return model.generate(prompt, **options, output_scores=True, return_dict_in_generate=True)

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
        theirs = generated(load_with_transformers(folder))
        torch.testing.assert_close(wanted.scores[0], theirs.scores[0], rtol=1e-3, atol=1e-3)
        stacked = [access for access in module.program.methods[0].schedule.accesses if access.routing is not None]
        layers = len(stacked) // 2
        assert layers
        for budget in (module.floor_bytes, full_bytes // 3, full_bytes // 2, full_bytes * 4 // 5):
            model.set_budget(max(budget, module.floor_bytes))
            before = module.stats()
            got = generated(model)
            assert torch.equal(got.sequences, wanted.sequences)
            assert all(torch.equal(one, other) for one, other in zip(got.scores, wanted.scores, strict=True))
            after = module.stats()
            misses = after.expert_misses - before.expert_misses
            uses = after.expert_hits - before.expert_hits + misses
            banks = module.plan.banks
            if not banks:
                # What every token reads has the memory first.
                assert budget < full_bytes // 2 and uses == 0
                continue
            # Of one token three experts; of the prompt at most all of them.
            assert TOP * (TOKENS - 1) * len(banks) < uses <= (TOP * (TOKENS - 1) + 12) * len(banks)
            assert after.expert_bytes - before.expert_bytes >= misses * min(bank.row_bytes for bank in banks)
        assert module.plan.banks
