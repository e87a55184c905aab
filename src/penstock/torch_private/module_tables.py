"""The tables in which a module keeps its tensors: a replacement put there keeps the tensor's name and place."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters and buffers, not those of its parts."""
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor


def has_buffers_of_its_own_making(module: nn.Module) -> bool:
    """Non-persistent ones, which no checkpoint holds."""
    return bool(module._non_persistent_buffers_set)
