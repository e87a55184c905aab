"""What the tests of the pass share: a module made of a function and tensors, every dtype, and custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.weight import ITEM_BYTES

# Every dtype that a weight can have and that this torch knows.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}


class Net(nn.Module):
    """`forward(net, *args, **kwargs)` over named tensors. A name says what a tensor becomes: buffer_..., transient_...
    (a non-persistent buffer), constant_... (an attribute that export lifts), and a parameter otherwise."""

    def __init__(self, forward: Callable[..., Any], **tensors: Tensor) -> None:
        super().__init__()
        self.function = forward
        for name, tensor in tensors.items():
            kind = name.split("_")[0]
            if kind in ("buffer", "transient"):
                self.register_buffer(name, tensor, persistent=kind == "buffer")
            elif kind == "constant":
                setattr(self, name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every pattern of bits that the dtype allows may come up, NaNs with payloads among them."""
    empty = torch.empty(shape, dtype=dtype)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (empty.numel() * empty.element_size(),), dtype=torch.uint8
    )
    return raw.view(dtype).view(shape)


@torch.library.custom_op("penstock_pass::doubled", mutates_args=())
def doubled(x: Tensor, w: Tensor) -> Tensor:
    return x @ w * 2


@doubled.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@torch.library.custom_op("penstock_pass::accumulate", mutates_args={"into"})
def accumulate(x: Tensor, w: Tensor, into: Tensor) -> None:
    into.add_(x @ w)


@accumulate.register_fake
def _(x: Tensor, w: Tensor, into: Tensor) -> None:
    return None


@torch.library.custom_op("penstock_pass::scale_all", mutates_args=())
def scale_all(tensors: list[Tensor]) -> list[Tensor]:
    return [t * 3 for t in tensors]


@scale_all.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]
