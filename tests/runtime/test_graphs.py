"""What of CUDA graphs needs no GPU: refusals at load, and the memory that a graph's inputs are kept in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import CaptureError
from penstock.runtime.captured_pass import _Kept
from penstock.runtime.graphs import check_capturable


def test_a_module_on_the_cpu_has_no_graphs(chain: Path) -> None:
    with pytest.raises(CaptureError, match="needs a CUDA device, and this module is on cpu"):
        penstock.Module(chain, "1GiB", cuda_graph=True, quiet=True)


def test_what_cannot_be_captured_is_said_at_load() -> None:
    gpu = torch.device("cuda", 0)
    check_capturable(gpu, "planned", "registered")
    with pytest.raises(CaptureError, match="under policy='lru' it is decided while running"):
        check_capturable(gpu, "lru", "registered")
    with pytest.raises(CaptureError, match="with host_memory='staged' the host fills buffers"):
        check_capturable(gpu, "planned", "staged")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).reshape(4, 6)[1:3, 2:5],
        torch.arange(3.0).expand(5, 3),
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.arange(5),
    ],
    ids=["plain", "permuted", "slice", "expanded", "scalar", "empty", "integers"],
)
def test_an_input_is_kept_as_it_lies_in_memory(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        kept = _Kept(tensor)
    assert kept.tensor.shape == tensor.shape and kept.tensor.stride() == tensor.stride()
    for value in (tensor, tensor + 1 if tensor.is_contiguous() else tensor):
        kept.take(value)
        assert torch.equal(kept.tensor, value)
    assert kept.tensor.numel() == 0 or kept.tensor.data_ptr() != tensor.data_ptr()
