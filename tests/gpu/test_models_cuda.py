"""Language models of transformers on a GPU: what tests/models/test_generation.py shows on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import BelowFloorError
from tests.models.checkpoints import FAST, save_checkpoint
from tests.models.comparison import compare_generation, prompt
from tests.models.conftest import quiet_transformers

__all__ = ["quiet_transformers"]  # a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Tens of megabytes: weights must be larger than a few pages of 2 MiB, or nothing would stream.
WIDE: dict[str, Any] = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, initializer_range=0.05)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(WIDE, num_attention_heads=8),
    "gemma3_text": dict(WIDE, num_attention_heads=8, layer_types=["sliding_attention", "full_attention"] * 2),
    "qwen3_moe": dict(WIDE, moe_intermediate_size=512),
    "mamba2": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    at_floor = compare_generation(family, tmp_path, "cuda", **FAMILIES[family])
    assert at_floor.bytes_streamed > 0 or not FAMILIES[family]


def test_bfloat16_is_identical_at_every_budget(tmp_path: Path) -> None:
    """With prompt lookup, too, and replayed as a CUDA graph."""
    folder = save_checkpoint("llama", tmp_path / "checkpoint", dtype=torch.bfloat16, **FAMILIES["llama"])
    ids = prompt(1, 5).repeat(1, 3).cuda()
    made, streamed = [], []
    for cuda_graph in (False, True):
        model = penstock.from_pretrained(
            folder, cache_length=64, cache_dir=tmp_path / "cache", inductor_configs=FAST, quiet=True,
            cuda_graph=cuda_graph,
        )  # fmt: skip
        for budget in (model.floor_bytes, model.weight_bytes // 2, model.weight_bytes * 2):
            model.set_budget(budget)
            for lookup in (None, 5):
                made.append(
                    model.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                        prompt_lookup_num_tokens=lookup, output_scores=True, return_dict_in_generate=True,
                    )
                )  # fmt: skip
            streamed.append(model.last_run.bytes_streamed)
        model.close()
    assert streamed[0] > streamed[1] > streamed[2] == 0
    for one in made[1:]:
        assert torch.equal(one.sequences, made[0].sequences)
        assert all(torch.equal(a, b) for a, b in zip(made[0].scores, one.scores, strict=True))


def test_a_cache_on_both_sides_is_identical_at_every_total(tmp_path: Path) -> None:
    folder = save_checkpoint(
        "llama", tmp_path / "checkpoint", dtype=torch.bfloat16, max_position_embeddings=256, **FAMILIES["llama"]
    )
    ids = prompt(1, 150).cuda()
    options: dict[str, Any] = dict(
        host_cache=True, cache_length=256, prefill_tokens=100, cache_dir=tmp_path / "cache", inductor_configs=FAST,
        quiet=True,
    )  # fmt: skip
    made, on_device = [], []
    for cuda_graph in (False, True):
        options["cuda_graph"] = cuda_graph
        with pytest.raises(BelowFloorError) as caught:
            penstock.from_pretrained(folder, device_memory=0, **options)
        # With graphs it is more: activations count twice.
        least = int(re.findall(r"smallest for this program is (\d+) bytes", str(caught.value))[0])
        for total in (least, least + (1 << 20), 8 << 30):
            model = penstock.from_pretrained(folder, device_memory=total, **options)
            made.append(
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, output_scores=True,
                    return_dict_in_generate=True,
                )
            )  # fmt: skip
            on_device.append(model.device_state_bytes)
            everything = model.state_bytes
            model.close()
    assert on_device[0] == on_device[3] < on_device[1] <= on_device[2] == everything
    for one in made[1:]:
        assert torch.equal(one.sequences, made[0].sequences)
        assert all(torch.equal(a, b) for a, b in zip(made[0].scores, one.scores, strict=True))
