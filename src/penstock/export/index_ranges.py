"""Finds which numbers a program's inputs may hold, because it indexes tables and caches with them.

An index outside its table makes compiled code end the process (a failed check inside a parallel loop) or leaves the GPU
unusable. The ranges found here go into the signature, so that a bad call is refused before it runs.

A number is followed from an input to an index through ops that leave it as it is or add a constant. A number that
cannot be followed has no range and is not checked. A number outside its range would fail in the model itself, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Node

from penstock.export.host_states import memory_origin
from penstock.program import IndexRange
from penstock.torch_private.graph import arguments, op_name

# Ops that take one index: the argument names of the table, the index and the dimension. In none of them does a negative
# number count from the end.
_ONE_INDEX = {
    "aten::embedding": ("weight", "indices", None),
    "aten::embedding_bag": ("weight", "indices", None),
    "aten::_embedding_bag": ("weight", "indices", None),
    "aten::_embedding_bag_forward_only": ("weight", "indices", None),
    "aten::index_select": ("self", "index", "dim"),
    "aten::gather": ("self", "index", "dim"),
    "aten::index_copy": ("self", "index", "dim"),
    "aten::index_add": ("self", "index", "dim"),
    "aten::index_reduce": ("self", "index", "dim"),
    "aten::scatter": ("self", "index", "dim"),
    "aten::scatter_add": ("self", "index", "dim"),
    "aten::scatter_reduce": ("self", "index", "dim"),
}
# Ops that take one index for each of the first dimensions; a negative number counts from the end.
_INDEX_LISTS = frozenset(
    ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::_unsafe_index_put", "aten::_index_put_impl")
)
# Ops whose result is their first argument after an update.
_UPDATES = frozenset(
    (
        "aten::index_copy",
        "aten::index_add",
        "aten::index_put",
        "aten::scatter",
        "aten::scatter_add",
        "aten::slice_scatter",
    )
)
_SAME = frozenset(
    ("aten::clone", "aten::alias", "aten::detach", "aten::contiguous", "aten::lift_fresh_copy", "aten::_to_copy")
)
_RESHAPES = frozenset(("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten"))
_WHOLE = (0, None, 1)
# Only casts to these are followed: a cast to fewer bits may cut a number so that only the result fits the table.
_INDEX_DTYPES = (torch.int32, torch.int64)
_WHOLE_NUMBERS = (*_INDEX_DTYPES, torch.int16, torch.int8, torch.uint8)

_Region = tuple[tuple[int, int | None, int], ...]


@dataclass(frozen=True)
class _Numbers:
    """What a node holds: the numbers in a region of an input, plus `added`."""

    source: str
    added: int
    region: _Region
    # For each dimension of the node, the dimension of the input that it runs along; None for one that repeats. None as
    # a whole after a reshape mixed them: then no part can be told apart any more.
    dims: tuple[int | None, ...] | None


def index_ranges(ep: ExportedProgram) -> dict[str, tuple[IndexRange, ...]]:
    """The ranges by input name, only for inputs whose numbers index something of a known size."""
    names = _table_names(ep)
    known: dict[Node, _Numbers] = {}
    found: dict[str, list[IndexRange]] = {}
    inputs = {
        spec.arg.name
        for spec in ep.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    }
    for node in ep.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if node.name in inputs and isinstance(value, torch.Tensor) and value.dtype in _WHOLE_NUMBERS:
                rank = value.dim()
                known[node] = _Numbers(node.name, 0, (_WHOLE,) * rank, tuple(range(rank)))
        elif node.op == "call_function":
            for table, index, dim, wraps in _uses(node):
                if index in known:
                    numbers = known[index]
                    entry = _range(numbers, table, dim, wraps, names)
                    if entry is not None:
                        found.setdefault(numbers.source, []).append(entry)
            source = node.args[0] if node.args else None
            if isinstance(source, Node) and source in known:
                followed = _followed(node, known[source], source)
                if followed is not None:
                    known[node] = followed
    return {name: _strictest(ranges) for name, ranges in found.items()}


def _table_names(ep: ExportedProgram) -> dict[str, str]:
    return {spec.arg.name: spec.target or spec.arg.name for spec in ep.graph_signature.input_specs}


def _uses(node: Node) -> Iterator[tuple[Node, Node, int, bool]]:
    """Each table that a node indexes: the table, the index, the dimension, and whether negative numbers count back."""
    name, given = op_name(node.target), arguments(node)
    if name in _ONE_INDEX:
        table_name, index_name, dim_name = _ONE_INDEX[name]
        table, index = given[table_name], given[index_name]
        rank = table.meta["val"].dim()
        if isinstance(index, Node) and rank:
            yield table, index, (0 if dim_name is None else given[dim_name]) % rank, False
    elif name in _INDEX_LISTS:
        for dim, index in enumerate(given["indices"]):
            if isinstance(index, Node):
                yield given["self"], index, dim, True


def _range(numbers: _Numbers, table: Node, dim: int, wraps: bool, names: dict[str, str]) -> IndexRange | None:
    size = table.meta["val"].shape[dim]
    if not isinstance(size, int):
        return None
    region = () if all(part == _WHOLE for part in numbers.region) else numbers.region
    low = -size if wraps else 0
    origin = _origin(table)
    return IndexRange(
        low=low - numbers.added,
        high=size - numbers.added,
        table=names.get(origin.name, origin.name),
        dim=dim,
        size=size,
        region=region,
    )


def _origin(table: Node) -> Node:
    """The weight, state or input that a table is a view or an updated version of; else what computed it."""
    origin = memory_origin(table)
    while op_name(origin.target) in _UPDATES:
        origin = memory_origin(arguments(origin)["self"])
    return origin


def _strictest(ranges: list[IndexRange]) -> tuple[IndexRange, ...]:
    """Drops the ranges that another one implies: the caches of all layers have the same size."""
    kept: list[IndexRange] = []
    for entry in ranges:
        if not any(_implies(other, entry) for other in kept):
            kept = [other for other in kept if not _implies(entry, other)] + [entry]
    return tuple(kept)


def _implies(one: IndexRange, other: IndexRange) -> bool:
    return one.region in ((), other.region) and one.low >= other.low and one.high <= other.high


# ---------------------------------------------------------------------------------------------------------- following


def _followed(node: Node, numbers: _Numbers, source: Node) -> _Numbers | None:
    """What a node holds if its first argument holds `numbers`; None if they cannot be followed through it."""
    name, given = op_name(node.target), arguments(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or (
        value.dtype not in _INDEX_DTYPES and value.dtype != source.meta["val"].dtype
    ):
        return None
    if name in _SAME:
        return numbers
    if name in ("aten::add", "aten::sub"):
        return _moved(numbers, given, -1 if name == "aten::sub" else 1)
    if name in _RESHAPES:
        return replace(numbers, dims=None)
    if numbers.dims is None:
        # Ops that only rearrange or repeat all of it.
        all_of_it = ("aten::unsqueeze", "aten::squeeze", "aten::permute", "aten::transpose", "aten::t", "aten::expand")
        return numbers if name in all_of_it else None
    return _viewed(str(name), given, numbers, numbers.dims, source.meta["val"].shape, value)


def _moved(numbers: _Numbers, given: dict[str, Any], sign: int) -> _Numbers | None:
    other, alpha = given["other"], given.get("alpha", 1)
    if type(other) is not int or type(alpha) is not int:
        return None
    return replace(numbers, added=numbers.added + sign * alpha * other)


def _viewed(
    name: str,
    given: dict[str, Any],
    numbers: _Numbers,
    dims: tuple[int | None, ...],
    shape: torch.Size,
    value: torch.Tensor,
) -> _Numbers | None:
    rank = len(dims)
    if name == "aten::unsqueeze":
        at = given["dim"] % (rank + 1)
        return replace(numbers, dims=(*dims[:at], None, *dims[at:]))
    if name == "aten::squeeze":
        asked = given.get("dim", range(rank))
        gone = {dim % rank for dim in ((asked,) if isinstance(asked, int) else asked) if _is_one(shape[dim])}
        return replace(numbers, dims=tuple(d for at, d in enumerate(dims) if at not in gone))
    if name in ("aten::permute", "aten::transpose", "aten::t"):
        order = list(range(rank))
        if name == "aten::permute":
            order = [dim % rank for dim in given["dims"]]
        elif rank > 1:
            first, second = (0, 1) if name == "aten::t" else (given["dim0"] % rank, given["dim1"] % rank)
            order[first], order[second] = order[second], order[first]
        return replace(numbers, dims=tuple(dims[dim] for dim in order))
    if name == "aten::expand":
        new = value.dim() - rank
        repeated = [_is_one(shape[at]) and not _is_one(value.shape[new + at]) for at in range(rank)]
        kept = [None if again else dim for dim, again in zip(dims, repeated, strict=True)]
        return replace(numbers, dims=(*[None] * new, *kept))
    if name == "aten::select":
        at, index = given["dim"] % rank, given["index"]
        rest = dims[:at] + dims[at + 1 :]
        if dims[at] is None:
            return replace(numbers, dims=rest)
        if not isinstance(index, int):
            return None
        return _cut(replace(numbers, dims=rest), dims[at], (index, index + 1 or None, 1))
    if name == "aten::slice":
        start, stop, step = given["start"] or 0, given["end"], given["step"]
        if stop is not None and isinstance(stop, int) and stop >= 2**62:
            stop = None
        if not all(part is None or type(part) is int for part in (start, stop, step)):
            return None
        if (start, stop, step) == _WHOLE:
            return numbers
        return _cut(numbers, dims[given["dim"] % rank], (start, stop, step))
    return None


def _is_one(size: Any) -> bool:
    """A dynamic size is never one: the tracer treats one as a size of its own."""
    return isinstance(size, int) and size == 1


def _cut(numbers: _Numbers, dim: int | None, part: tuple[int, int | None, int]) -> _Numbers | None:
    """Cuts only along a dimension of the input, and each only once."""
    if dim is None or numbers.region[dim] != _WHOLE:
        return None
    region = numbers.region
    return replace(numbers, region=(*region[:dim], part, *region[dim + 1 :]))
