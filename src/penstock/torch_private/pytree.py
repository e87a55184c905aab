"""Specs of nested arguments, as text and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree


def dump_spec(spec: Any) -> str:
    return _pytree.treespec_dumps(spec)


def flatten(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[list[Any], str]:
    """The leaves of a call, and its spec as text."""
    leaves, spec = _pytree.tree_flatten((arguments, keywords))
    return leaves, dump_spec(spec)


def unflatten(leaves: Sequence[Any], spec: str) -> Any:
    return _pytree.tree_unflatten(list(leaves), _pytree.treespec_loads(spec))


def flat_call_spec(count: int) -> Any:
    """The spec of a call with `count` positional arguments."""
    return _pytree.tree_structure(((0,) * count, {}))


def flat_result_spec(count: int) -> Any:
    return _pytree.tree_structure((0,) * count)
