"""A KV cache on both sides of the link: how much of it lies on the device follows from one total, and no bit does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import penstock
from penstock.errors import BelowFloorError, ModelError, PenstockError
from penstock.models.host_attention import NAME
from penstock.models.stateful import make_stateful, traceable
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint
from tests.models.comparison import prompt, same
from tests.models.families import build

BATCH, LENGTH, PIECE = 2, 300, 100
# Two layers, two sequences, two heads of 16 numbers in float32, keys and values.
BLOCK_BYTES = 64 * 2 * BATCH * 2 * 16 * 4 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("host_cache") / "llama", max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def load(folder: Path, cache_dir: Path, device_memory: int | None, **options: Any) -> Any:
    return penstock.from_pretrained(
        folder,
        device_memory=device_memory,
        host_cache=True,
        cache_length=LENGTH,
        batch=BATCH,
        prefill_tokens=PIECE,
        cache_dir=cache_dir,
        device="cpu",
        inductor_configs=FAST,
        quiet=True,
        **options,
    )


@pytest.fixture(scope="module")
def least(folder: Path, cache_dir: Path) -> int:
    """With no position on the device."""
    with pytest.raises(BelowFloorError, match="the smallest for this program is") as caught:
        load(folder, cache_dir, 0)
    return int(re.findall(r"smallest for this program is (\d+) bytes", str(caught.value))[0])


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_with_transformers(folder)


@pytest.fixture(scope="module")
def everything(folder: Path, cache_dir: Path) -> Iterator[Any]:
    model = load(folder, cache_dir, 1 << 30)
    yield model
    model.close()


def logits(model: Any, ids: Tensor) -> list[Tensor]:
    """Of a prompt in pieces that cross several blocks, and of tokens behind it, one and many at a time."""
    cache, found, at = model.new_cache(), [], 0
    for count in (170, 1, 1, 60, 1):
        out = model(ids[:, at : at + count], past_key_values=cache, logits_to_keep=min(count, 8))
        found.append(out.logits)
        at += count
    return found


def test_tokens_and_scores_are_those_of_transformers(reference: Any, everything: Any) -> None:
    same(reference, everything, prompt(1, PIECE + 31))
    same(reference, everything, prompt(2, 7))
    same(reference, everything, prompt(1, 6).repeat(1, 3), do_sample=True, top_k=0, temperature=1.5)
    same(reference, everything, prompt(1, 9), num_beams=2)
    same(reference, everything, prompt(1, 6).repeat(1, 4), prompt_lookup_num_tokens=4)


def test_the_same_bits_at_every_total(folder: Path, cache_dir: Path, least: int, everything: Any) -> None:
    ids = prompt(2, 233)
    wanted = logits(everything, ids)
    on_device = []
    # The first half of a cache comes before weights, so from here to all of that the weights have their floor.
    for total in (least, least + BLOCK_BYTES, least + 2 * BLOCK_BYTES + 5, least + 8 * BLOCK_BYTES):
        model = load(folder, cache_dir, total)
        assert all(map(torch.equal, logits(model, ids), wanted))
        assert model.budget_bytes >= model.floor_bytes
        on_device.append(model.device_state_bytes)
        model.close()
    assert on_device[:3] == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert on_device[3] <= everything.device_state_bytes == everything.state_bytes


def test_a_byte_less_is_refused(folder: Path, cache_dir: Path, least: int) -> None:
    with pytest.raises(BelowFloorError, match=f"smallest for this program is {least} bytes"):
        load(folder, cache_dir, least - 1)


def test_padded_rows_are_refused(everything: Any) -> None:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    with pytest.raises(ModelError, match="host_cache=True.*attention knows of no padding: give rows of equal length"):
        everything.generate(prompt(2, 7), attention_mask=mask, max_new_tokens=2)


def test_a_budget_for_weights_alone_divides_nothing(folder: Path, cache_dir: Path) -> None:
    with pytest.raises(PenstockError, match="give that as device_memory="):
        load(folder, cache_dir, None)


# Families whose attention is nothing but causal: what a program of theirs computes is compared below.
TAKEN = (
    "llama", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt_neox", "gpt_bigcode", "olmo", "olmo2", "granite",
    "stablelm", "cohere", "glm", "glm4", "glm4_moe", "helium", "nemotron", "persimmon", "smollm3", "seed_oss",
    "ernie4_5", "arcee", "apertus", "hunyuan_v1_dense", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe",
    "phimoe", "minimax_m2",
)  # fmt: skip


@pytest.mark.parametrize("family", TAKEN)
def test_what_is_computed(family: str) -> None:
    """Not compiled: piece by piece over the border between the sides, beside transformers' own attention."""
    reference, model = build(family), build(family)
    state = make_stateful(model, slots=100, batch=2, host_cache=True)
    assert {part.field for part in state.parts} == {"device_kv", "host_kv"}
    ids = prompt(2, 90)
    with torch.no_grad():
        wanted = reference(ids).logits
    at = 0
    with traceable():
        model.kept_logits = 0
        for count in (50, 30, 1, 8, 1):
            found = model(ids[:, at : at + count], torch.full((2,), at))
            assert (found - wanted[:, at : at + count]).abs().max() < 1e-4 * wanted.std()
            at += count


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mistral", "layers of the kind StaticSlidingWindowLayer"),
        ("bloom", "does not run with a cache of fixed length"),
        ("gpt_oss", "layers of the kind StaticSlidingWindowLayer"),
        ("deepseek_v3", "host_cache=True is for models in which both are alike"),
        ("mamba2", "layers of the kind LinearAttentionLayer"),
    ],
)
def test_other_attention_is_refused(family: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        make_stateful(build(family, meta=True), slots=100, batch=1, host_cache=True)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"softcap": 50.0}, "takes softcap; host_cache=True is for models in which every token"),
        ({"sliding_window": 16, "s_aux": torch.zeros(2)}, "takes s_aux, sliding_window;"),
        ({"starts": torch.zeros(1, 1, dtype=torch.int64)}, "takes a mask of its own, such as a window;"),
        ({"starts": None}, "takes a mask of its own"),
    ],
)
def test_what_changes_who_sees_what_is_refused_by_name(given: dict[str, Any], why: str) -> None:
    q, near, far = torch.ones(1, 2, 1, 16), torch.zeros(2, 1, 2, 64, 16), torch.zeros(2, 1, 2, 64, 16)
    starts = {"starts": torch.zeros(1, dtype=torch.int64)}
    attend = ALL_ATTENTION_FUNCTIONS[NAME]
    attended, _ = attend(None, q, near, far, **starts, sliding_window=None, use_cache=True)
    assert attended.shape == (1, 1, 2, 16)
    with pytest.raises(ModelError, match=why):
        attend(None, q, near, far, **{**starts, **given})


def test_a_model_is_refused_before_it_is_compiled(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.compiling.compile_program", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(ModelError, match="StaticSlidingWindowLayer; host_cache=True is for full attention"):
        load(save_checkpoint("mistral", tmp_path / "mistral", max_position_embeddings=LENGTH), cache_dir, 1 << 30)
