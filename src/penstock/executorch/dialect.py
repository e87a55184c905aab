"""Turns what ExecuTorch hands to a backend from the edge dialect back into ATen, as penstock.compile takes it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputSpec
from torch.fx import Graph, GraphModule, Node

from penstock.errors import UnsupportedProgramError
from penstock.export.offload import WEIGHT_KINDS, mutated_targets, placeholders
from penstock.ops import FETCH
from penstock.torch_private.graph import OpOverload, op_name, overload_name

_ATEN = torch.ops.aten
# Copying ops whose view is not named after them. A reshape copies where a view is impossible.
_RENAMED = {"view_copy": "reshape"}
_DIM_ORDER_OPS = {
    "_to_dim_order_copy": _ATEN._to_copy.default,
    "_clone_dim_order": _ATEN.clone.default,
    "_empty_dim_order": _ATEN.empty.memory_format,
}
_FORMATS = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}


def aten_program(ep: ExportedProgram, names: Mapping[str, str]) -> ExportedProgram:
    """The same program over ATen ops, with every weight under the name that its fetch carries. `ep` is left alone.

    `names` maps further names of tied weights to their first ones.
    """
    module = copy.deepcopy(ep.graph_module)
    for part in module.modules():
        if isinstance(part, GraphModule):
            _rewrite_ops(part.graph)
            part.recompile()
    graph = module.graph
    signature = copy.deepcopy(ep.graph_signature)
    values = {**ep.constants, **ep.state_dict}
    _inline_scalars(graph, signature, values)
    state_dict = _name_weights(ep, graph, signature, values, names)
    graph.lint()
    module.recompile()
    return ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=signature,
        state_dict=state_dict,
        range_constraints=copy.copy(ep.range_constraints),
        module_call_graph=ep.module_call_graph,
        # Non-persistent buffers are looked up here.
        constants={name: value for name, value in values.items() if name not in ep.state_dict},
    )


# --------------------------------------------------------------------------------------------------------------- ops


def _rewrite_ops(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, EdgeOpOverload):
            op: OpOverload = node.target._op
            if op.namespace == "dim_order_ops":
                _restore_memory_format(node, op)
            else:
                node.target = plain_op(op)


def plain_op(op: OpOverload) -> OpOverload:
    """The view op that matches a copying op such as view_copy; any other op as it is."""
    if op.namespace != "aten":
        return op
    stem = str(op_name(op)).removeprefix("aten::")
    name = _RENAMED.get(stem) or (stem.removesuffix("_copy") if stem.endswith("_copy") else None)
    if not name or name == "_to":
        return op
    packet = getattr(_ATEN, name, None)
    # reshape has no overload for a view as another dtype.
    overload = overload_name(op)
    if stem == "view_copy" and overload != "default":
        packet = _ATEN.view
    if packet is None or overload not in packet.overloads():
        return op
    found = getattr(packet, overload)
    assert isinstance(found, OpOverload)
    return found


def _restore_memory_format(node: Node, op: OpOverload) -> None:
    name = str(op_name(op)).split("::")[-1]
    if name not in _DIM_ORDER_OPS:
        raise UnsupportedProgramError(f"{op} at {node.name!r} has no counterpart in ATen that is known here")
    keywords = dict(node.kwargs)
    order = keywords.pop("dim_order", None)
    if order is not None:
        keywords["memory_format"] = _memory_format(node, order)
    if name == "_clone_dim_order":
        keywords.pop("non_blocking", None)
    node.target = _DIM_ORDER_OPS[name]
    node.kwargs = keywords


def _memory_format(node: Node, order: Any) -> torch.memory_format:
    dims: Sequence[int] = tuple(order)
    if dims == tuple(range(len(dims))):
        return torch.contiguous_format
    if dims not in _FORMATS:
        raise UnsupportedProgramError(f"{node.name!r} has dim order {list(dims)}, which no memory format of torch has")
    return _FORMATS[dims]


# ----------------------------------------------------------------------------------------------------------- weights


def _is_weight(spec: InputSpec) -> bool:
    return spec.kind in WEIGHT_KINDS and spec.target is not None


def _inline_scalars(graph: Graph, signature: ExportGraphSignature, values: Mapping[str, Any]) -> None:
    """Puts numbers that the edge dialect lifted into constants back into the code, where no fetch reads them."""
    nodes = placeholders(graph)
    kept: list[InputSpec] = []
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        value = values.get(spec.target) if _is_weight(spec) and spec.target is not None else None
        lifted = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "meta"
        if not lifted or any(user.target is FETCH for user in node.users):
            kept.append(spec)
            continue
        assert isinstance(value, torch.Tensor)
        if node.users:
            with graph.inserting_before(first):
                number = graph.call_function(
                    _ATEN.full.default, ((), value.item()), {"dtype": value.dtype, "device": value.device}
                )
            number.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(number)
        graph.erase_node(node)
    signature.input_specs = kept


def _name_weights(
    ep: ExportedProgram,
    graph: Graph,
    signature: ExportGraphSignature,
    values: dict[str, Any],
    further_names: Mapping[str, str],
) -> dict[str, Any]:
    """Gives weights that were copied for several partitions their names back, with one placeholder for each name."""
    nodes = placeholders(graph)
    states = mutated_targets(ep)
    kept: list[InputSpec] = []
    first_of: dict[str, Node] = {}
    state_dict: dict[str, Any] = {}
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        if not _is_weight(spec) or spec.target in states:
            if _is_weight(spec) and spec.persistent is not False:
                assert spec.target is not None
                state_dict[spec.target] = values[spec.target]
            kept.append(spec)
            continue
        assert spec.target is not None
        if spec.target not in values:
            raise UnsupportedProgramError(f"{spec.target!r} has no tensor in the program")
        value = values[spec.target]
        fetched = (str(user.args[2]) for user in node.users if user.target is FETCH)
        names = {further_names.get(name, name) for name in fetched}
        if len(names) > 1:
            raise UnsupportedProgramError(f"{spec.target!r} is fetched under several names: {', '.join(sorted(names))}")
        name = names.pop() if names else spec.target
        if name in first_of:
            node.replace_all_uses_with(first_of[name])
            graph.erase_node(node)
            continue
        first_of[name] = node
        spec.target = name
        values[name] = value
        if spec.persistent is not False:
            state_dict[name] = value
        kept.append(spec)
    signature.input_specs = kept
    return state_dict


# ------------------------------------------------------------------------------------------------- what is left over


def is_fetch(node: Node) -> bool:
    target = node.target
    return node.op == "call_function" and (target._op if isinstance(target, EdgeOpOverload) else target) is FETCH


def erase_fetches(graph_module: GraphModule) -> int:
    """Removes fetches outside of delegates, where a weight is read where it lies. Returns how many it removed."""
    count = 0
    for node in list(graph_module.graph.nodes):
        if is_fetch(node):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
            count += 1
    if count:
        graph_module.graph.lint()
        graph_module.recompile()
    return count
