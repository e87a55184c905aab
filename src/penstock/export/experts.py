"""Finds the reads of a weight that take experts: rows of stacked matrices, by an index that is known only at run time.
Those become our own ops, which need only the rows that are asked for, wherever they lie.

Two forms are known, both as transformers exports them. "batched_mm" gathers the matrices of each token by index and
multiplies with them; "grouped_mm" sorts tokens by expert and multiplies with groups of rows. A weight that looks like
experts but is read in another way is named, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from penstock.export.gathers import row_index
from penstock.ops import GROUPED, ROWS
from penstock.torch_private.graph import arguments, fake_mode_of, op_name, size_bound
from penstock.weight import EXPERT_UNIT_BYTES, MOST_EXPERTS

# Per expert. A smaller one is not worth its own op or slot.
_LEAST_ROW_BYTES = 4096
# A session makes room for this many bytes of a grouped product's matrices at once. csrc/session/planned_experts.cpp has
# the same number.
_ROOM_BYTES = 64 << 20
_GROUPED_OPS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
# How far back two indexes are compared.
_KEY_DEPTH = 6
# How modules of experts and their parameters are named. Shared experts do not count: every token reads them.
_NAME = re.compile(r"(?<!shared)(^|[._])experts?([._]|$)")


@dataclass(frozen=True)
class _Reader:
    node: Node
    # For rows: the index that takes them. For a grouped product: where the rows of each expert end.
    index: Node
    # For a grouped product: what is multiplied, and whether the weight has the layout of a linear's weight.
    x: Node | None = None
    is_linear: bool = False


def rewrite_experts(graph: Graph, weight: Node, access: int) -> Hashable:
    """Make every reader of a lent weight an op that takes experts, if all of them can be. Gives the key of their index.

    None: nothing was changed.
    """
    if obstacle(weight) is not None:
        return None
    found = [_reader(user, weight) for user in _users(weight)]
    readers = [reader for reader in found if reader is not None]
    indexes = {index_key(reader.index) for reader in readers}
    if not readers or len(readers) < len(found) or len(indexes) > 1:
        return None
    index = index_key(readers[0].index)
    for reader in readers:
        _rewrite(graph, reader, weight, access)
    for user in list(weight.users):
        if not user.users and user.target not in (ROWS, GROUPED):
            graph.erase_node(user)
    return index


def index_key(node: Node, depth: int = _KEY_DEPTH) -> Hashable:
    """Equal for nodes that compute the same from the same inputs: each use of `ids[layer]` is a node of its own."""
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or not depth or torch.Tag.nondeterministic_seeded in tags or node.kwargs:
        return node

    def key(value: Any) -> Hashable:
        if isinstance(value, Node):
            return index_key(value, depth - 1)
        return tuple(map(key, value)) if isinstance(value, (list, tuple)) else repr(value)

    return node.target, *map(key, node.args)


def count_by_comparing(graph: Graph) -> None:
    """Count the rows of each expert without a histogram. The CPU has none for integers, and transformers uses one
    unless it is exported there."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.histc.default):
        given = arguments(node)
        numbers, bins = given["self"].meta["val"], given["bins"]
        if numbers.dtype.is_floating_point or (given["min"], given["max"]) != (0, bins - 1):
            continue
        with graph.inserting_before(node), _fake_mode(numbers):
            steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
                (aten.unsqueeze.default, (given["self"], -1), {}),
                (aten.arange.default, (bins,), {"dtype": numbers.dtype, "device": numbers.device}),
            ]
            column, experts = (graph.call_function(*step) for step in steps)
            column.meta["val"] = numbers.unsqueeze(-1)
            experts.meta["val"] = torch.arange(bins, dtype=numbers.dtype, device=numbers.device)
            equal = graph.call_function(aten.eq.Tensor, (column, experts))
            equal.meta["val"] = column.meta["val"] == experts.meta["val"]
            counts = graph.call_function(aten.sum.dim_IntList, (equal, [0]), {"dtype": numbers.dtype})
            counts.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(counts)
        graph.erase_node(node)


def _fake_mode(value: torch.Tensor) -> Any:
    mode = fake_mode_of(value)
    assert mode is not None, "values of an exported graph are fake"
    return mode


def why_whole(weight: Node, target: str, *, row_by_row: bool) -> str | None:
    """Why a weight that looks like experts is read whole; None if it does not look like experts."""
    value = weight.meta["val"]
    grouped = [user for user in _users(weight) if op_name(user.target) in _GROUPED_OPS]
    gathered = [user for user in _users(weight) if row_index(user, weight) is not None]
    named = bool(_NAME.search(target)) and value.dim() > 1
    if value.dim() < 3:
        return "experts are modules of their own here, and not rows of one weight" if named else None
    if not (named or grouped or gathered):
        return None
    reason = obstacle(weight) if row_by_row else "its experts do not lie one after the other"
    if reason is not None:
        return reason
    others = [user for user in _users(weight) if _reader(user, weight) is None]
    if others:
        in_groups = op_name(others[0].target) in _GROUPED_OPS
        if in_groups and (reason := _obstacle_in_groups(weight)) is not None:
            return reason
        return f"{op_name(others[0].target) or others[0].target} at {others[0].name!r} reads all of it"
    return "its readers take experts by more than one index"


def obstacle(weight: Node) -> str | None:
    """Why the rows of a lent weight cannot be experts, whatever reads them."""
    value = weight.meta["val"]
    if value.dim() < 3:
        return f"it has {value.dim()} dimensions; experts are stacked matrices"
    experts = value.shape[0]
    row_bytes = value[0].numel() * value.element_size() if experts else 0
    if not 0 < experts <= MOST_EXPERTS:
        return f"it has {experts} rows; a table of experts has room for {MOST_EXPERTS}"
    if row_bytes < _LEAST_ROW_BYTES or row_bytes % EXPERT_UNIT_BYTES:
        return (
            f"an expert has {row_bytes} bytes; needs a multiple of {EXPERT_UNIT_BYTES}, and {_LEAST_ROW_BYTES} at least"
        )
    return None


def _obstacle_in_groups(weight: Node) -> str | None:
    """Why no session can multiply with groups of these experts: the kernels shift rows of x and of the result
    (csrc/experts/expert_operands.cpp)."""
    value = weight.meta["val"]
    columns, rows = (size * value.element_size() for size in value.shape[1:])
    if rows % EXPERT_UNIT_BYTES or columns % EXPERT_UNIT_BYTES:
        return (
            f"its matrices have rows of {rows} bytes and columns of {columns}; to be multiplied in groups both need a "
            f"multiple of {EXPERT_UNIT_BYTES}"
        )
    return None


def _users(weight: Node) -> list[Node]:
    """Readers of the weight and of its transposed matrices."""
    found: list[Node] = []
    for user in weight.users:
        found += user.users if _is_transpose(user) else [user]
    return found


def _is_transpose(node: Node) -> bool:
    """Whether the node transposes the matrices, not the stack."""
    given = arguments(node)
    if node.target is torch.ops.aten.permute.default:
        return [dim % 3 for dim in given["dims"]] == [0, 2, 1] and node.meta["val"].dim() == 3
    if node.target is torch.ops.aten.transpose.int:
        return node.meta["val"].dim() == 3 and {given["dim0"] % 3, given["dim1"] % 3} == {1, 2}
    return False


def _reader(node: Node, weight: Node) -> _Reader | None:
    index = row_index(node, weight)
    if index is not None:
        return _Reader(node, index)
    if op_name(node.target) not in _GROUPED_OPS or _obstacle_in_groups(weight) is not None:
        return None
    given = arguments(node)
    names = ("self", "mat2") if "mat2" in given else ("input", "weight")
    x, matrices, ends = given[names[0]], given[names[1]], given["offs"]
    extra = given.get("bias") is not None or given.get("out_dtype") is not None
    if not isinstance(ends, Node) or extra or x is weight or x.meta["val"].dim() != 2:
        return None
    if matrices is not weight and not (_is_transpose(matrices) and matrices.all_input_nodes == [weight]):
        return None
    return _Reader(node, ends, x, matrices is not weight)


def _rewrite(graph: Graph, reader: _Reader, weight: Node, access: int) -> None:
    node, value = reader.node, reader.node.meta["val"]
    with graph.inserting_before(node):
        if reader.x is None:
            result = graph.call_function(ROWS, (weight, _as(graph, reader.index, torch.int64), access))
        else:
            ends = _as(graph, reader.index, torch.int32)
            result = graph.call_function(GROUPED, (reader.x, weight, ends, reader.is_linear, access))
        result.meta["val"] = value.new_empty(value.shape)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _as(graph: Graph, numbers: Node, dtype: torch.dtype) -> Node:
    value = numbers.meta["val"]
    if value.dtype is dtype:
        return numbers
    cast = graph.call_function(torch.ops.aten._to_copy.default, (numbers,), {"dtype": dtype})
    cast.meta["val"] = value.to(dtype)
    return cast


def experts_workspace_bound_bytes(module: Any, ep: ExportedProgram) -> int | None:
    """The most that any grouped product allocates besides its result; None if a size has no bound."""
    largest = 0
    for node in module.graph.find_nodes(op="call_function", target=GROUPED):
        x, weight = node.args[0].meta["val"], node.args[1].meta["val"]
        rows = size_bound(x.shape[0], ep.range_constraints)
        if rows is None:
            return None
        matrix_bytes = weight[0].numel() * weight.element_size()
        room_bytes = max(matrix_bytes, min(_ROOM_BYTES, weight.numel() * weight.element_size()))
        columns = node.meta["val"].shape[1]
        largest = max(largest, room_bytes + rows * (x.shape[1] + columns) * x.element_size())
    return largest
