"""Calls of ops that write into their arguments, as torch.export rewrites them (auto_functionalized_v2).

Such a call takes the written tensors as bases and names them by their position in that list. It returns the op's own
results, followed by the bases as they are after the call.
"""

from __future__ import annotations

import operator
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from penstock.torch_private.graph import arguments, higher_order_name, op_name

FUNCTIONALIZED = "auto_functionalized_v2"


def called_op(node: Node) -> str | None:
    """The name of the operator that a node calls, also one that was functionalized; None for anything else."""
    op = _functionalized(node)
    return op_name(node.target if op is None else op)


def called_with(node: Node, argument: str) -> Any:
    """What the operator of `called_op` gets for one of its arguments; for a written one, the base that it shows."""
    if _functionalized(node) is None:
        return arguments(node)[argument]
    position = node.kwargs.get(f"_{argument}_base_index")
    if position is None:
        return node.kwargs.get(argument)
    bases: Any = node.kwargs["_all_bases"]
    return bases[position]


def before_call(node: Node) -> Node | None:
    """For a result that is a base after a functionalized call: the same base before it. None for anything else."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    call = node.args[0]
    op = _functionalized(call)
    if op is None:
        return None
    # An op without results returns a None in their place.
    position = int(node.args[1]) - max(1, len(op._schema.returns))  # type: ignore[arg-type]
    bases: Any = call.kwargs["_all_bases"]
    return bases[position] if position >= 0 else None


def _functionalized(node: Node) -> OpOverload | None:
    if higher_order_name(node.target) != FUNCTIONALIZED or not isinstance(node.args[0], OpOverload):
        return None
    return node.args[0]
