"""What is written from a checkpoint is what transformers loads from it, byte for byte, and what it computes besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.export.checkpoint import MadeTensor
from penstock.export.safetensors_file import StoredTensor, stored_tensor
from penstock.models.building import build_on_meta, derived_buffers, model_dtype
from penstock.models.conversion import converted
from penstock.models.families import TESTED
from penstock.models.folder import open_checkpoint
from tests.models.checkpoints import load_with_transformers, save_checkpoint

STACKED = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "phimoe", "minimax_m2", "dots1"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(TESTED))
def test_tensors_are_those_that_transformers_loads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(family, tmp_path, dtype=dtype))
    assert len(checkpoint.shards) > 1
    reference = load_with_transformers(tmp_path)
    model = build_on_meta(checkpoint, model_dtype(checkpoint.config, None))
    wanted = reference.state_dict()
    assert all(tensor.device.type == "meta" for tensor in model.state_dict().values())
    assert {n: (t.dtype, t.shape) for n, t in model.state_dict().items()} == {
        n: (t.dtype, t.shape) for n, t in wanted.items()
    }

    found = converted(model, checkpoint.tensors)
    tied = {name for name in wanted if name not in found}
    assert all(
        any(wanted[name] is wanted[other] or wanted[name].data_ptr() == wanted[other].data_ptr() for other in found)
        for name in tied
    )
    for name, source in found.items():
        assert isinstance(source, StoredTensor | MadeTensor)
        tensor = source.make() if isinstance(source, MadeTensor) else stored_tensor(source)
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) == (source.dtype, source.shape)
        assert torch.equal(tensor, wanted[name]), name
    if family in STACKED:
        assert any(isinstance(source, MadeTensor) for source in found.values())

    buffers = {name: buffer for name, buffer in reference.named_buffers() if name not in wanted}
    derived = derived_buffers(checkpoint, dtype)
    assert set(derived) == set(buffers)
    for name, buffer in buffers.items():
        assert derived[name].dtype == buffer.dtype and torch.equal(derived[name], buffer), name


def test_another_dtype_is_cast_as_transformers_casts_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(save_checkpoint("llama", tmp_path))
    model = build_on_meta(checkpoint, torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    for name, source in converted(model, checkpoint.tensors).items():
        assert isinstance(source, MadeTensor)
        assert torch.equal(source.make(), reference[name])
