"""How arguments or results nest: torch's pytree specs in JSON, as a program file records them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import PackageError
from penstock.printable import printable
from penstock.schema import SchemaError, parse_json

LEAF = "leaf"
_PROTOCOL = 1
_DEEPEST = 64
_SHOWN = 200


@dataclass(frozen=True)
class Node:
    """One container, or a leaf. `keys` are a dict's, in the order of the children."""

    kind: str
    keys: tuple[Any, ...]
    children: tuple[Node, ...]

    @property
    def leaf_count(self) -> int:
        return 1 if self.kind == LEAF else sum(child.leaf_count for child in self.children)

    @property
    def is_plain(self) -> bool:
        known = self.kind in (LEAF, "builtins.tuple", "builtins.list", "builtins.dict")
        return known and all(child.is_plain for child in self.children)


def parse_call(spec: str, leaf_count: int) -> Node:
    """The nesting of a call: a tuple of positional arguments, then a dict of keywords."""
    root = parse_nesting(spec, leaf_count)
    if root.kind != "builtins.tuple" or [child.kind for child in root.children] != ["builtins.tuple", "builtins.dict"]:
        raise PackageError(f"the inputs nest as {_shown(spec)}, which is not a tuple of positional ones and a dict")
    if not all(isinstance(key, str) for key in root.children[1].keys):
        raise PackageError(f"the inputs nest as {_shown(spec)}, where a keyword is not text")
    return root


def parse_nesting(spec: str, leaf_count: int) -> Node:
    try:
        document = parse_json(spec)
        if type(document) is not list or len(document) != 2:
            raise SchemaError("it is not a list of a protocol and a tree")
        if document[0] != _PROTOCOL or type(document[0]) is not int:
            raise SchemaError(f"its protocol is {document[0]!r:.40}; this release reads {_PROTOCOL}")
        root = _node(document[1], 0)
    except SchemaError as error:
        raise PackageError(f"the structure {_shown(spec)} is damaged: {printable(str(error))}") from error
    if root.leaf_count != leaf_count:
        raise PackageError(
            f"the structure {_shown(spec)} has {root.leaf_count} leaves, the signature lists {leaf_count}"
        )
    return root


def _node(row: Any, depth: int) -> Node:
    if depth > _DEEPEST:
        raise SchemaError(f"it is nested more than {_DEEPEST} deep")
    if type(row) is not dict or not {"type", "context", "children_spec"} <= row.keys():
        raise SchemaError("a part of it is not an object with a type, a context and children_spec")
    kind, rows = row["type"], row["children_spec"]
    if type(rows) is not list:
        raise SchemaError("the children of a part are no list")
    if kind is None:
        if rows:
            raise SchemaError("a leaf has children")
        return Node(LEAF, (), ())
    if type(kind) is not str:
        raise SchemaError("the type of a part is not text")
    children = tuple(_node(child, depth + 1) for child in rows)
    return Node(kind, _keys(row["context"], len(children)) if kind == "builtins.dict" else (), children)


def _keys(context: Any, count: int) -> tuple[Any, ...]:
    keys = parse_json(context) if type(context) is str else None
    if type(keys) is not list or any(isinstance(key, list | dict) for key in keys):
        raise SchemaError("the keys of a dict are no list of plain values")
    if len(keys) != count or len(set(keys)) != count:
        raise SchemaError(f"a dict has {len(set(keys))} keys and {count} values")
    return tuple(keys)


def _shown(spec: str) -> str:
    return printable(spec if len(spec) <= _SHOWN else spec[:_SHOWN] + "...")
