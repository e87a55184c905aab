"""What an fx node's op does, by its schema; and which memory a tensor lies in."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._ops import OpOverload as OpOverload  # also for type hints elsewhere
from torch.fx import Graph, Node
from torch.utils._sympy.value_ranges import bound_sympy


def op_name(target: Any) -> str | None:
    """The name of an operator with its namespace, such as "aten::linear"; None for anything else."""
    return str(target._schema.name) if isinstance(target, OpOverload) else None


def overload_name(op: OpOverload) -> str:
    return str(op._overloadname)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call of an operator by name, however they were passed; defaults where they were not."""
    if not isinstance(node.target, OpOverload):
        return {}
    declared = node.target._schema.arguments
    values = {a.name: a.default_value for a in declared}
    values.update(zip(values, node.args, strict=False))
    values.update(node.kwargs)
    return values


def gives_view(target: Any) -> bool:
    """Whether the op's results are declared to share memory with its first input, unwritten."""
    if not isinstance(target, OpOverload):
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def writes(target: Any) -> bool:
    """Whether the op is declared to write into one of its inputs."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def view_source(node: Node) -> Node | None:
    """The node whose memory this one shows, also as one of several views (a split gives them as a list)."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    op = source.target if node.target is operator.getitem else node.target
    return source if gives_view(op) else None


def memory_of(node: Node) -> Node:
    """The node whose memory this one shows through however many views."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def higher_order_name(target: Any) -> str | None:
    """The name of a higher-order operator (control flow, kernel wrappers); None for anything else."""
    return str(target.name()) if isinstance(target, HigherOrderOperator) else None


def namespace(target: Any) -> str | None:
    return str(target.namespace) if isinstance(target, OpOverload) else None


def move_to_front(graph: Graph, node: Node) -> None:
    graph._root.append(node)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors over one storage, also on meta, where there is no address."""
    return int(tensor.untyped_storage()._cdata)


def fake_mode_of(value: Any) -> Any:
    """The fake mode that a fake tensor belongs to; None for anything else."""
    return getattr(value, "fake_mode", None)


def shape_symbols(tensor: torch.Tensor, declared: Mapping[Any, Any]) -> dict[str, tuple[int, int | None]]:
    """Dynamic sizes of a fake tensor: name -> lowest and highest value; None where there is no bound.

    `declared` are the ranges of an ExportedProgram. The tracer assumes narrower ones: never a size of 0 or 1.
    """
    symbols: dict[str, tuple[int, int | None]] = {}
    for size in tensor.shape:
        if isinstance(size, torch.SymInt):
            for symbol in size.node.expr.free_symbols:
                found = declared[symbol] if symbol in declared else size.node.shape_env.var_to_range[symbol]
                finite = found.upper.is_number and found.upper.is_finite and found.upper < 2**62
                symbols[str(symbol)] = (int(found.lower), int(found.upper) if finite else None)
    return symbols


def size_bound(size: int | torch.SymInt, declared: Mapping[Any, Any]) -> int | None:
    """The largest that a size can be by the ranges of an ExportedProgram; None where there is no bound."""
    if isinstance(size, int):
        return size
    ranges = {**size.node.shape_env.var_to_range, **declared}
    return finite_bound(size.node.expr, ranges)


def finite_bound(expression: Any, ranges: Mapping[Any, Any]) -> int | None:
    upper = bound_sympy(expression, dict(ranges)).upper
    return int(upper) if upper.is_number and upper.is_finite and upper.is_integer and upper < 2**62 else None
