"""What of CUDA graphs needs no GPU: refusals at load, and the memory that a graph's inputs are kept in."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.captured_pass import _Kept


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
