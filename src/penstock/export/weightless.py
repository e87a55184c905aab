"""From an offloaded program to one without weights: fetches become factory ops, state becomes inputs.

The program given is left as it is: everything here works on a copy of its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx import Graph, GraphModule, Node

from penstock.errors import UnsupportedProgramError
from penstock.export.experts import count_by_comparing, rewrite_experts, why_whole
from penstock.export.gathers import is_gathered
from penstock.export.host_states import check_host_sides
from penstock.export.index_ranges import index_ranges
from penstock.export.linears import rewrite_linears
from penstock.export.offload import WEIGHT_KINDS, access_number, fetches, insert_fetches, mutated_targets, placeholders
from penstock.layout import canonical
from penstock.ops import FETCH, FORCE_CLONE, MATERIALIZE, WEIGHT
from penstock.program import ConstantSpec, Signature, TensorSpec
from penstock.torch_private.graph import (
    fake_mode_of,
    higher_order_name,
    memory_of,
    move_to_front,
    namespace,
    op_name,
    shape_symbols,
    view_source,
    writes,
)
from penstock.torch_private.pytree import dump_spec, make_flat

# Higher-order ops that call a kernel on the spot: their operands live only as long as any other reader's.
_PLAIN_OPERATORS = frozenset(
    (
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
        "auto_functionalized",
        "auto_functionalized_v2",
    )
)
# Control flow that may return these operands as results (a loop that makes no trip): their position in the arguments.
_CARRIED_OPERANDS = {"while_loop": 2, "scan": 1, "associative_scan": 1}
# Reads of a weight that the compiler would rather repeat in each of their readers than store. If it repeated them, an
# embedding table would be held until the last reader of what was gathered from it.
_REPEATED_READS = frozenset(("aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::_to_copy"))
_ASYNCHRONOUS_NAMESPACES = frozenset(("_c10d_functional", "c10d", "c10d_functional", "streams", "_dtensor", "symm_mem"))


@dataclass(frozen=True)
class WeightlessProgram:
    module: GraphModule
    example_inputs: tuple[torch.Tensor, ...]
    # Access number -> name in the program of the weight it fetches.
    weight_of: dict[int, str]
    # Accesses whose weight must stay in place throughout.
    pinned: frozenset[int]
    # Accesses that read only rows of their weight, by index.
    gathered: frozenset[int]
    # Accesses whose every reader is a penstock_linear.
    linear: frozenset[int]
    # Accesses that take experts -> the first access with the same index.
    routing: dict[int, int]
    # Names in the program of weights that look like experts but are read whole -> why.
    whole_experts: dict[str, str]
    # Names of the states, in the order of the leading inputs.
    states: tuple[str, ...]
    signature: Signature


@dataclass(frozen=True)
class _Accesses:
    """What is found out about accesses, by number, while their fetches are rewritten."""

    weight_of: dict[int, str] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    linear: set[int] = field(default_factory=set)
    # Index that takes experts -> the accesses with that index, in the order in which they are met.
    routed: dict[Hashable, list[int]] = field(default_factory=dict)
    whole_experts: dict[str, str] = field(default_factory=dict)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_weightless(
    ep: ExportedProgram, device: torch.device, states: frozenset[str], *, split_linear: bool = False
) -> WeightlessProgram:
    """Rewrite one method for `device`. `states` names what is state in any method of the model.

    With `split_linear`, products with weights become penstock_linear where they can.
    """
    _refuse_unsupported(ep)
    check_host_sides(ep, device, states)
    graph = Graph()
    mapped: dict[Node, Node] = {}
    output = graph.graph_copy(ep.graph, mapped)
    graph.output(output)
    # Keyed by the signature's names: a copy renames what is named like a builtin (an argument called "input").
    nodes = {name: mapped[node] for name, node in placeholders(ep.graph).items()}
    values = {name: node.meta["val"] for name, node in placeholders(ep.graph).items()}
    fake_mode = _fake_mode(values.values())

    accesses = _Accesses()
    state_nodes: list[tuple[str, Node]] = []
    input_nodes: list[Node] = []
    inputs: list[TensorSpec | ConstantSpec] = []
    indexes = index_ranges(ep)
    target_of: dict[Node, str] = {}
    for spec in ep.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind in WEIGHT_KINDS:
            assert spec.target is not None
            if spec.target in states:
                for user in list(node.users):  # read-only in this method, written by another one
                    if user.target is FETCH:
                        user.replace_all_uses_with(node)
                        graph.erase_node(user)
                if node.users or spec.target in mutated_targets(ep):
                    state_nodes.append((spec.target, node))
                else:
                    graph.erase_node(node)
            else:
                target_of[node] = spec.target
        elif spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
            input_nodes.append(node)
            name = spec.arg.name
            inputs.append(replace(_tensor_spec(name, values[name]), indexes=indexes.get(name, ())))
        elif spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
            inputs.append(ConstantSpec(spec.arg.name, spec.arg.value))
            node.replace_all_uses_with(spec.arg.value)  # type: ignore[arg-type]
            graph.erase_node(node)
        else:
            raise UnsupportedProgramError(
                f"input {spec.arg.name!r} ({spec.kind.name.lower()}, {type(spec.arg).__name__}) is neither a tensor "
                "nor a constant; pass it as a tensor"
            )

    count_by_comparing(graph)
    insert_fetches(graph, target_of)  # constants that a decomposition lifted after the pass
    # These are written while values read from them live on (in this method or in another one).
    for node in (*dict(state_nodes).values(), *_mutated_inputs(ep, nodes)):
        _clone_carried(graph, node)
    outputs = _rewrite_outputs(ep, graph, dict(state_nodes), nodes)
    for node, target in target_of.items():
        _rewrite_fetches(graph, node, target, device, accesses, split_linear)
        graph.erase_node(node)
    strays = [access_number(fetch) for fetch in fetches(graph)]
    if strays:
        raise UnsupportedProgramError(
            f"accesses {strays} fetch something other than a weight of the program: it was changed after "
            "apply_weight_offload, which must come last"
        )
    _order_placeholders(graph, [node for _, node in state_nodes] + input_nodes)
    graph.lint()

    moves = any(_elsewhere(value, device) for value in values.values())
    module = _retarget(GraphModule(ep.graph_module, graph), device, fake_mode, moves=moves)
    example_inputs = tuple(node.meta["val"] for node in module.graph.find_nodes(op="placeholder"))
    flat_outputs = module.graph.output_node().args[0]
    # A flat call: pytrees are the caller's business, recorded in the signature.
    make_flat(module, len(example_inputs), len(flat_outputs))  # type: ignore[arg-type]
    in_spec, out_spec = ep.call_spec.in_spec, ep.call_spec.out_spec
    return WeightlessProgram(
        module=module,
        example_inputs=example_inputs,
        weight_of=accesses.weight_of,
        pinned=frozenset(accesses.pinned),
        gathered=frozenset(accesses.gathered),
        linear=frozenset(accesses.linear),
        routing={number: min(numbers) for numbers in accesses.routed.values() for number in numbers},
        whole_experts=accesses.whole_experts,
        states=tuple(name for name, _ in state_nodes),
        signature=Signature(
            inputs=tuple(inputs),
            outputs=outputs,
            in_spec=_dump("inputs", in_spec),
            out_spec=_dump("outputs", out_spec),
            symbols=_symbols(ep, values.values()),
            written=tuple(
                str(spec.target)
                for spec in ep.graph_signature.output_specs
                if spec.kind is OutputKind.USER_INPUT_MUTATION
            ),
        ),
    )


def _dump(what: str, spec: Any) -> str:
    try:
        return dump_spec(spec)
    except NotImplementedError as error:
        raise UnsupportedProgramError(f"the structure of the {what} cannot be written to a file: {error}") from error


def _refuse_unsupported(ep: ExportedProgram) -> None:
    for node in ep.graph.nodes:
        if node.op != "call_function":
            continue
        if writes(node.target):
            raise UnsupportedProgramError(
                f"{node.target} at {node.name!r} writes in place, and what it writes may be state: the program was "
                "exported again after apply_weight_offload; call run_decompositions({}) on it"
            )
        if namespace(node.target) in _ASYNCHRONOUS_NAMESPACES:
            raise UnsupportedProgramError(
                f"{node.target} at {node.name!r}: collectives and user streams read beyond their launch and cannot be "
                "combined with offloaded weights"
            )


def _fake_mode(values: Any) -> Any:
    for value in values:
        mode = fake_mode_of(value)
        if mode is not None:
            return mode
    raise UnsupportedProgramError("the program's inputs carry no shapes: it was not made by torch.export.export")


def _tensor_spec(name: str, value: torch.Tensor) -> TensorSpec:
    def plain(size: Any) -> int | str:
        return int(size) if isinstance(size, int) else str(size)

    return TensorSpec(
        name=name,
        dtype=dtype_name(value.dtype),
        shape=tuple(plain(size) for size in value.shape),
        strides=tuple(plain(stride) for stride in value.stride()),
    )


def _symbols(ep: ExportedProgram, values: Any) -> dict[str, tuple[int, int | None]]:
    symbols: dict[str, tuple[int, int | None]] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            symbols.update(shape_symbols(value, ep.range_constraints))
    return symbols


# ----------------------------------------------------------------------------------------------------------- fetches


def _rewrite_fetches(
    graph: Graph, weight: Node, target: str, device: torch.device, accesses: _Accesses, split_linear: bool
) -> None:
    value = weight.meta["val"]
    order = canonical(value.shape, value.stride())
    row_by_row = order == tuple(range(len(order)))
    for fetch in list(weight.users):
        number = access_number(fetch)
        if number in accesses.weight_of:
            raise UnsupportedProgramError(
                f"access number {number} stands twice, for {accesses.weight_of[number]!r} and {target!r}: the program "
                "was put together from two offloaded ones; apply_weight_offload must come last"
            )
        if not fetch.users:
            graph.erase_node(fetch)
            continue
        accesses.weight_of[number] = target
        with graph.inserting_before(fetch):
            lent = graph.call_function(WEIGHT, (number, [value.shape[d] for d in order], value.dtype, device))
            lent.meta["val"] = fetch.meta["val"].permute(order)
            result = lent
            if not row_by_row:
                # The op carries no strides: other layouts are the permuted view of a contiguous tensor.
                inverse = [order.index(d) for d in range(len(order))]
                result = graph.call_function(torch.ops.aten.permute.default, (lent, inverse))
                result.meta["val"] = fetch.meta["val"]
        fetch.replace_all_uses_with(result)
        graph.erase_node(fetch)
        _guard_control_flow(graph, result, number, accesses.pinned)
        index = rewrite_experts(graph, result, number) if row_by_row and number not in accesses.pinned else None
        if index is not None:
            accesses.routed.setdefault(index, []).append(number)
            accesses.gathered.add(number)
            continue
        if split_linear and row_by_row and rewrite_linears(graph, result, number):
            accesses.linear.add(number)
        elif is_gathered(result):
            accesses.gathered.add(number)
        if number not in accesses.gathered and (reason := why_whole(result, target, row_by_row=row_by_row)):
            accesses.whole_experts[target] = reason
        _materialize_reads(graph, result)


def _guard_control_flow(graph: Graph, lent: Node, number: int, pinned: set[int]) -> None:
    """Bodies of control flow read their operands where no schedule can follow."""
    _clone_carried(graph, lent)
    for consumer, _ in _users_through_views(lent):
        name = higher_order_name(consumer.target)
        if name is not None and name not in _PLAIN_OPERATORS:
            pinned.add(number)


def _clone_carried(graph: Graph, source: Node) -> None:
    """Carried operands may come back out of control flow: what comes out must be a copy."""
    for consumer, value in _users_through_views(source):
        position = _CARRIED_OPERANDS.get(higher_order_name(consumer.target) or "")
        if position is None or not _contains(consumer.args[position], value):
            continue
        with graph.inserting_before(consumer):
            copy = graph.call_function(FORCE_CLONE, (value,))
        copy.meta["val"] = value.meta["val"]
        arguments = list(consumer.args)
        arguments[position] = torch.fx.map_arg(arguments[position], _replacing(value, copy))
        consumer.args = tuple(arguments)


def _materialize_reads(graph: Graph, lent: Node) -> None:
    for reader in {consumer for consumer, _ in _users_through_views(lent)}:
        if op_name(reader.target) not in _REPEATED_READS:
            continue
        consumers = [c for c, _ in _users_through_views(reader) if view_source(c) is None]
        if len(consumers) > 1:
            with graph.inserting_after(reader):
                stored = graph.call_function(MATERIALIZE, (reader,))
            stored.meta["val"] = reader.meta["val"]
            for user in [user for user in reader.users if user is not stored]:
                user.replace_input_with(reader, stored)


def _users_through_views(node: Node) -> list[tuple[Node, Node]]:
    """(consumer, the value it takes) for every consumer of a node and of views of it."""
    found: list[tuple[Node, Node]] = []
    for user in list(node.users):
        if view_source(user) is node:
            found.extend(_users_through_views(user))
        found.append((user, node))
    return found


def _replacing(old: Node, new: Node) -> Callable[[Node], Node]:
    return lambda node: new if node is old else node


def _contains(arguments: Any, node: Node) -> bool:
    hits: list[Node] = []
    torch.fx.map_arg(arguments, lambda n: hits.append(n) if n is node else None)
    return bool(hits)


# ----------------------------------------------------------------------------------------------------------- outputs


def _rewrite_outputs(
    ep: ExportedProgram, graph: Graph, states: dict[str, Node], inputs: dict[str, Node]
) -> tuple[TensorSpec | ConstantSpec, ...]:
    """Mutations become copies into the inputs they belong to; what is left are the user's outputs, tensors only."""
    output = graph.output_node()
    results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    written: list[Node] = list(states.values())
    kept: list[Node] = []
    specs: list[TensorSpec | ConstantSpec] = []
    copies: list[tuple[Node, Node]] = []
    for value, spec in zip(results, ep.graph_signature.output_specs, strict=True):
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            copies.append((states[spec.target], value))
            written.append(value)
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            copies.append((inputs[spec.target], value))
            written.append(value)
        elif spec.kind is OutputKind.USER_OUTPUT and isinstance(value, Node) and _is_tensor(value):
            specs.append(_tensor_spec(spec.arg.name, value.meta["val"]))
            kept.append(value)
        elif spec.kind is OutputKind.USER_OUTPUT and not isinstance(value, Node):
            specs.append(ConstantSpec(getattr(spec.arg, "name", ""), value))
        else:
            raise UnsupportedProgramError(
                f"output {spec.arg.name!r} ({spec.kind.name.lower()}) is not a tensor; return it as a tensor"
            )
    with graph.inserting_before(output):
        # A result that shares memory with state would change with the next run.
        kept = [graph.call_function(FORCE_CLONE, (value,)) if memory_of(value) in written else value for value in kept]
        for target, value in copies:
            if value is not target:
                graph.call_function(torch.ops.aten.copy_.default, (target, value))
    output.args = (tuple(kept),)
    return tuple(specs)


def _mutated_inputs(ep: ExportedProgram, inputs: dict[str, Node]) -> list[Node]:
    specs = ep.graph_signature.output_specs
    return [inputs[s.target] for s in specs if s.kind is OutputKind.USER_INPUT_MUTATION and s.target is not None]


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


# ------------------------------------------------------------------------------------------------------------ device


def _order_placeholders(graph: Graph, wanted: list[Node]) -> None:
    for node in reversed(wanted):
        move_to_front(graph, node)


def _elsewhere(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type not in (device.type, "meta")


def _free_layouts(graph: Graph, *, moves: bool, body: bool) -> None:
    """Undo what export settled for the layouts of the device it ran on. Attention, for example, strides its result
    differently on a GPU, so a reshape that became a view on the CPU is not one there."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif op_name(node.target) == "aten::as_strided" and moves:
            base = memory_of(node)
            # Weights and inputs keep their layout; what a body is handed may have any layout.
            if body or (base.op != "placeholder" and base.target is not WEIGHT):
                raise UnsupportedProgramError(
                    f"as_strided at {node.name!r} spells out the memory layout of {base.name!r} on the device of the "
                    "export, which may differ on the target; export the model on the target device"
                )


def _retarget(
    module: GraphModule, device: torch.device, fake_mode: Any, *, moves: bool, body: bool = False
) -> GraphModule:
    """A copy of the module and its bodies of control flow, with every device replaced by the target. It does not matter
    where the model sits, and none of it is moved."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _free_layouts(graph, moves=moves, body=body)
    bodies: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            attribute = _attribute(module, str(node.target))
            if not isinstance(attribute, GraphModule):
                raise UnsupportedProgramError(
                    f"{node.target!r} is read as an attribute ({type(attribute).__name__}), not through the program's "
                    "signature; such a tensor would end up inside the program"
                )
            bodies[str(node.target)] = _retarget(attribute, device, fake_mode, moves=moves, body=True)
        node.args = _on_device(node.args, device)
        node.kwargs = _on_device(node.kwargs, device)
        if "val" in node.meta:
            node.meta = {**node.meta, "val": _fake_on_device(node.meta["val"], device, fake_mode)}
    return GraphModule(bodies, graph)


def _attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device):
        return device
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(item, device) for item in value)
    return value


def _fake_on_device(value: Any, device: torch.device, fake_mode: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        with fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, (list, tuple)):
        return type(value)(_fake_on_device(item, device, fake_mode) for item in value)
    return value
