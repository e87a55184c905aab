"""What from_pretrained refuses before it looks for a checkpoint, and so long before it compiles anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
    DeviceError,
    HostMemoryError,
    ModelError,
    PenstockError,
)
from tests.models.checkpoints import save_checkpoint


def load(tmp_path: Path, **options: Any) -> None:
    """Of a checkpoint that is not there: whatever comes first is what is raised."""
    penstock.from_pretrained(tmp_path / "none", **{"device": "cpu", "cache_dir": tmp_path / "cache", **options})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "streamed"}, PenstockError, "Module has no mode= any more: use placement="),
        ({"policy": "lru"}, PenstockError, "Module has no policy= any more: use placement="),
        ({"bugdet": "8GiB"}, TypeError, "from_pretrained() got an unexpected keyword argument 'bugdet'"),
        ({"weights": "model.ptd"}, TypeError, "from_pretrained() got an unexpected keyword argument 'weights'"),
        ({"placement": "fast"}, PenstockError, "placement is 'fast'; it must be one of"),
        (
            {"placement": "split"},
            PenstockError,
            'placement="split" does not go with a program compiled without split_linear=True',
        ),
        ({"split_limits": "measured"}, PenstockError, "split_limits= does not go with a module without the kernel"),
        (
            {"pack": True, "placement": "in-place"},
            PenstockError,
            'placement="in-place" does not go with packed weights',
        ),
        ({"pack": True, "placement": "lru"}, PenstockError, 'placement="lru" does not go with packed weights'),
        ({"placement": "in-place", "host_memory": "1GiB"}, PenstockError, "does not go with a cap on host memory"),
        ({"cuda_graph": True}, CaptureError, "cuda_graph=True does not go with a CPU"),
        ({"calibration": "soon"}, PenstockError, "calibration is 'soon'; it must be a Calibration"),
        ({"host_memory": "much"}, HostMemoryError, "host_memory is 'much'"),
        ({"budget": "much"}, BudgetError, "'much' is not a number of bytes"),
        ({"device_memory": "auto"}, BudgetError, "device_memory: 'auto' is not a number of bytes"),
        ({"weight_offload_budget_mb": -1}, BudgetError, "weight_offload_budget_mb is -1"),
        ({"budget": "8GiB", "device_memory": "8GiB"}, BudgetError, "device_memory= does not go with budget="),
        ({"budget": "8GiB", "host_cache": True}, PenstockError, "host_cache=True does not go with a budget"),
        ({"check_indices": "no"}, PenstockError, "check_indices is 'no'; it must be True or False"),
        ({"device": "gpu"}, DeviceError, "'gpu' is not a device"),
    ],
    ids=str,
)
def test_options_are_judged_before_anything_is_compiled(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        load(tmp_path, **options)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": "auto", "placement": "in-place"},
        {"device_memory": None, "budget": 0, "placement": "stream", "host_memory": "1GiB", "pack": True},
        {"device_memory": "8GiB", "host_cache": True},
        {"weight_offload_budget_mb": 3, "calibration": "first-runs", "check_indices": True, "verify": True},
    ],
    ids=str,
)
def test_what_goes_together_comes_to_the_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="none"):
        load(tmp_path, **options)


@pytest.mark.parametrize(
    ("family", "options", "text"),
    [
        ("llama", {"cache_length": "64"}, "cache_length is '64'; it must be an int of at least 2"),
        ("llama", {"cache_length": 64.0}, "cache_length is 64.0; it must be an int of at least 2"),
        ("llama", {"batch": 0}, "batch is 0; it must be an int of at least 1"),
        ("llama", {"prefill_tokens": 1}, "prefill_tokens is 1; it must be an int of at least 2"),
        ("llama", {"cache_length": 512}, "was made for up to 256 positions"),
        ("mamba", {"prefill_tokens": 8}, "models of the type mamba run prompts token by token; leave it out"),
    ],
)
def test_lengths_are_judged_by_the_checkpoint(tmp_path: Path, family: str, options: dict[str, Any], text: str) -> None:
    save_checkpoint(family, tmp_path / "none")
    with pytest.raises(ModelError, match=re.escape(text)):
        load(tmp_path, **options)
    assert not (tmp_path / "cache").exists()
