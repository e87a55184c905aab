"""Specs of nested arguments, as text and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree

# The form of the text. Program files hold it, and are read without torch.
_PROTOCOL = 1


def dump_spec(spec: Any) -> str:
    return _pytree.treespec_dumps(spec, _PROTOCOL)


def flatten(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[list[Any], str]:
    """The leaves of a call, and its spec as text."""
    leaves, spec = _pytree.tree_flatten((arguments, keywords))
    return leaves, dump_spec(spec)


def unflatten(leaves: Sequence[Any], spec: str) -> Any:
    return _pytree.tree_unflatten(list(leaves), _pytree.treespec_loads(spec))


def leaves_of(tree: Any) -> list[Any]:
    return _pytree.tree_leaves(tree)


def with_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting, with what the function gives for each tensor in its place."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def make_flat(module: GraphModule, inputs: int, outputs: int) -> None:
    """Declare that a module takes so many positional arguments and gives so many results, nothing nested."""
    module._in_spec = _pytree.tree_structure(((0,) * inputs, {}))
    module._out_spec = _pytree.tree_structure((0,) * outputs)
