"""The custom ops as torch sees them: schema, mutation, fake tensors, devices that differ."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.kv import ops


def arguments(device: str = "cpu") -> dict[str, torch.Tensor]:
    return dict(
        device_kv=torch.randn(2, 2, 2, 64, 8, device=device),
        host_kv=torch.randn(2, 2, 2, 7, 8),
        starts=torch.arange(63, 61, -1, device=device),
        counts=torch.arange(1, 3, device=device),
    )


def test_the_ops_keep_what_their_schemas_promise() -> None:
    """Among others: nothing but what is marked is mutated, and fakes have the shape and strides of the real thing."""
    given = arguments()
    k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    torch.library.opcheck(ops.APPEND, (given["device_kv"], given["host_kv"], k, v, given["starts"], given["counts"]))
    q = torch.randn(2, 3, 6, 8).transpose(1, 2)
    torch.library.opcheck(ops.ATTEND, (q, *given.values(), 0.3, 2))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_fakes_take_a_host_side_on_another_device(device: str) -> None:
    """What torch.export needs on a machine without a GPU."""
    with FakeTensorMode():
        given = arguments(device)
        q, k = torch.empty(2, 6, 3, 8, device=device), torch.empty(2, 2, 3, 8, device=device)
        ops.APPEND(k=k, v=k, **given)
        out = ops.ATTEND(q=q, **given, scale=1.0, host_programs=4)
    assert out.device.type == device
    assert out.shape == q.shape and out.is_contiguous()
