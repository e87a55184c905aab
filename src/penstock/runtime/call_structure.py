"""The nesting of a call's arguments, or of its results, as the program file records it.

Tuples, lists and dicts are walked here, in a few microseconds and with any order of keys; other containers go through
torch's own flattening, for which they must be registered in this process as they were at export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import InputError
from penstock.nesting import LEAF, Node, parse_call, parse_nesting
from penstock.torch_private.pytree import flatten, unflatten


class CallStructure:
    """How a method's arguments nest: positional ones, then keywords."""

    def __init__(self, spec: str, leaf_count: int) -> None:
        self._spec = spec
        self._root = parse_call(spec, leaf_count)
        self._plain = self._root.is_plain

    def leaves(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """Raises InputError, without the method's signature, if the nesting differs."""
        if self._plain:
            positional, named = self._root.children
            leaves: list[Any] = []
            if len(arguments) != len(positional.children):
                by_name = f"; {', '.join(map(repr, keywords))} cannot be given by name" if keywords else ""
                raise InputError(
                    f"got {len(arguments)} positional arguments, needs {len(positional.children)}"
                    f"{by_name if not named.keys else ''}"
                )
            for index, (child, value) in enumerate(zip(positional.children, arguments, strict=True)):
                _collect(child, value, ("argument", index), leaves)
            _collect_items(named, keywords, ("keywords",), leaves)
            return leaves
        names = self._root.children[1].keys
        if set(keywords) == set(names):
            keywords = {name: keywords[name] for name in names}
        flat, spec = flatten(arguments, keywords)
        if spec != self._spec:
            raise InputError(f"got arguments that nest as {spec}, needs {self._spec}")
        return flat

    def render(self, leaves: Sequence[str]) -> str:
        """The arguments as one would write a call, each leaf replaced by its text."""
        texts = iter(leaves)
        positional, named = self._root.children
        parts = [_render(child, texts) for child in positional.children]
        parts += [f"{name}={_render(child, texts)}" for name, child in zip(named.keys, named.children, strict=True)]
        return ", ".join(parts)


class ResultStructure:
    """How a method's results nest."""

    def __init__(self, spec: str, leaf_count: int) -> None:
        self._spec = spec
        self._root = parse_nesting(spec, leaf_count)
        self._plain = self._root.is_plain

    def build(self, leaves: Sequence[Any]) -> Any:
        return _build(self._root, iter(leaves)) if self._plain else unflatten(leaves, self._spec)


def _collect(node: Node, value: Any, path: tuple[Any, ...], leaves: list[Any]) -> None:
    kind = node.kind
    if kind == LEAF:
        leaves.append(value)
    elif kind == "builtins.dict":
        if type(value) is not dict:
            raise InputError(f"{_place(path)} is of type {type(value).__name__}, needs to be a dict")
        _collect_items(node, value, path, leaves)
    else:
        expected = tuple if kind == "builtins.tuple" else list
        if type(value) is not expected:
            raise InputError(f"{_place(path)} is of type {type(value).__name__}, needs to be a {expected.__name__}")
        if len(value) != len(node.children):
            raise InputError(f"{_place(path)} has {len(value)} items, needs {len(node.children)}")
        for index, (child, item) in enumerate(zip(node.children, value, strict=True)):
            _collect(child, item, (*path, index), leaves)


def _collect_items(node: Node, items: dict[Any, Any], path: tuple[Any, ...], leaves: list[Any]) -> None:
    if len(items) != len(node.keys) or not all(key in items for key in node.keys):
        got, needs = ", ".join(map(repr, items)) or "none", ", ".join(map(repr, node.keys)) or "none"
        what = "keyword arguments" if path == ("keywords",) else f"keys of {_place(path)}"
        raise InputError(f"got the {what} {got}; needs {needs}")
    for key, child in zip(node.keys, node.children, strict=True):
        _collect(child, items[key], (*path, key), leaves)


def _place(path: tuple[Any, ...]) -> str:
    start, *steps = path
    if start == "keywords":
        name, *steps = steps
        return f"keyword argument {name}" + "".join(f"[{step!r}]" for step in steps)
    number, *steps = steps
    return f"positional argument {number}" + "".join(f"[{step!r}]" for step in steps)


def _render(node: Node, texts: Iterator[str]) -> str:
    if node.kind == LEAF:
        return next(texts)
    children = [_render(child, texts) for child in node.children]
    if node.kind == "builtins.tuple":
        return f"({', '.join(children)}{',' if len(children) == 1 else ''})"
    if node.kind == "builtins.list":
        return f"[{', '.join(children)}]"
    if node.kind == "builtins.dict":
        return "{" + ", ".join(f"{key!r}: {child}" for key, child in zip(node.keys, children, strict=True)) + "}"
    return f"{node.kind.rpartition('.')[2]}({', '.join(children)})"


def _build(node: Node, leaves: Iterator[Any]) -> Any:
    if node.kind == LEAF:
        return next(leaves)
    children = [_build(child, leaves) for child in node.children]
    if node.kind == "builtins.tuple":
        return tuple(children)
    return children if node.kind == "builtins.list" else dict(zip(node.keys, children, strict=True))
