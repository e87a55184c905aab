"""The pass: a fetch op in front of every use of every weight."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import Graph, GraphModule, Node

from penstock.errors import (
    AlreadyOffloadedError,
    NotAProgramError,
    NoWeightsError,
    TrainingGraphError,
    UnsupportedProgramError,
)
from penstock.ops import FETCH
from penstock.torch_private.graph import arguments, namespace, op_name, view_source

WEIGHT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# Views that give the bytes another dtype.
_DTYPE_VIEWS = frozenset(("aten::view", "aten::view_as_complex", "aten::view_as_real", "aten::real", "aten::imag"))
MUTATION_KINDS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
_GRADIENT_KINDS = (OutputKind.LOSS_OUTPUT, OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)


def apply_weight_offload(ep: ExportedProgram) -> ExportedProgram:
    """Return a program that reads every weight through a numbered `penstock::fetch`.

    The result is an ordinary ExportedProgram: it runs eagerly with the same outputs, can be saved, loaded and
    decomposed, and is what `penstock.compile` and ExecuTorch's lowering take. The program given is left as it is.
    """
    require_program(ep)
    if fetches(ep.graph):
        raise AlreadyOffloadedError("apply_weight_offload was applied to this program before; compile it as it is")
    refuse_training(ep)
    # Straight from torch.export, mutations are still in-place ops (a KV cache would look like a weight) and quantized
    # weights are still tensor subclasses. Functionalising names the first and flattens the second.
    program = _functional(ep)
    insert_program_fetches(program)
    if not fetches(program.graph):
        unused = ", ".join(spec.target or "?" for spec in weight_specs(program)) or "none"
        raise NoWeightsError(f"the program reads no weight (parameters and buffers it never reads: {unused})")
    return program


def _functional(ep: ExportedProgram) -> ExportedProgram:
    try:
        program: ExportedProgram = ep.run_decompositions({})
        return program
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise UnsupportedProgramError(
            f"torch cannot functionalise the program (ExportedProgram.run_decompositions fails on it as well): "
            f"{type(error).__name__}: {reason}"
        ) from error


def require_program(ep: object) -> None:
    if not isinstance(ep, ExportedProgram):
        hint = "; call torch.export.export(model, args) first" if isinstance(ep, torch.nn.Module) else ""
        raise NotAProgramError(f"expected a torch.export.ExportedProgram, got {type(ep).__name__}{hint}")


def fetches(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="call_function", target=FETCH)


def mutated_targets(ep: ExportedProgram) -> frozenset[str]:
    """Names of the buffers (and parameters) that the program writes: its state."""
    specs = ep.graph_signature.output_specs
    return frozenset(spec.target for spec in specs if spec.kind in MUTATION_KINDS and spec.target is not None)


def weight_specs(ep: ExportedProgram) -> list[InputSpec]:
    """The inputs that are weights: parameters, buffers and lifted constants, less those that the program mutates."""
    mutated = mutated_targets(ep)
    return [s for s in ep.graph_signature.input_specs if s.kind in WEIGHT_KINDS and s.target not in mutated]


def placeholders(graph: Graph) -> dict[str, Node]:
    return {node.name: node for node in graph.find_nodes(op="placeholder")}


def insert_program_fetches(ep: ExportedProgram) -> None:
    """Put a fetch in front of every use of a weight, in place."""
    graph = ep.graph
    nodes = placeholders(graph)
    insert_fetches(graph, {nodes[spec.arg.name]: spec.target for spec in weight_specs(ep) if spec.target is not None})
    # A returned weight is now a fetch of it: the signature names outputs by node.
    for output, output_spec in zip(graph.output_node().args[0], ep.graph_signature.output_specs, strict=True):
        if isinstance(output_spec.arg, TensorArgument) and isinstance(output, Node):
            output_spec.arg = TensorArgument(name=output.name)
    graph.lint()
    ep.graph_module.recompile()


def insert_fetches(graph: Graph, weights: Mapping[Node, str]) -> None:
    """Put a fetch in front of every use that has none yet; `weights` maps placeholders to names.

    Constants that appear after the pass (a later decomposition may lift some) get theirs when this is called again.
    """
    numbers = itertools.count(1 + max((access_number(node) for node in fetches(graph)), default=-1))

    for weight, name in weights.items():
        _refuse_strides_spelled_out(weight, name)

        def fetch(weight: Node = weight, name: str = name) -> Node:
            node = graph.call_function(FETCH, (weight, next(numbers), name))
            node.meta["val"] = FETCH(weight.meta["val"], node.args[1], name)
            return node

        _fetch_uses(graph, weight, fetch)
    # Remove the views that every consumer now has its own copy of. Removing all dead code could also drop what the
    # program's signature still names.
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and _is_view(node):
            graph.erase_node(node)


def _refuse_strides_spelled_out(weight: Node, name: str) -> None:
    """as_strided indexes the weight's storage; a fetch gives only the weight itself, without gaps and overlaps."""
    value = weight.meta["val"]
    pending = list(weight.users)
    while pending:
        node = pending.pop()
        if view_source(node) is not None:
            pending.extend(node.users)
        if not (op_name(node.target) or "").startswith("aten::as_strided"):
            continue
        given = arguments(node)
        offset = given["storage_offset"]
        if offset is None:
            offset = given["self"].meta["val"].storage_offset()
        known = all(isinstance(number, int) for number in (*given["size"], *given["stride"], offset))
        inside = known and value.numel() > offset + sum(
            (size - 1) * stride for size, stride in zip(given["size"], given["stride"], strict=True)
        )
        if not inside or value.storage_offset() or FETCH(value, 0, name).stride() != value.stride():
            raise UnsupportedProgramError(
                f"as_strided at {node.name!r} reads {name!r} by the strides of its storage, which the weight does not "
                "fill in order from its start; slice or index it instead, or make it contiguous before exporting"
            )


def access_number(fetch: Node) -> int:
    number = fetch.args[1]
    assert isinstance(number, int)
    return number


def _fetch_uses(graph: Graph, source: Node, make: Callable[[], Node]) -> None:
    """Give each consumer of `source`, also of views of it, a fetch of its own right before itself.

    One fetch for two uses that lie far apart (a tied embedding, a transpose made once) would hold the weight all the
    way between them.
    """
    for user in list(source.users):
        if user.target is FETCH:
            continue
        if op_name(user.target) == "aten::_assert_tensor_metadata":
            graph.erase_node(user)  # checks the dtype and device of a weight: settled here and now, not a read
        elif _is_view(user) and user.args[0] is source and user.all_input_nodes.count(source) == 1:

            def again(view: Node = user) -> Node:
                base = make()
                copy = graph.node_copy(view, lambda n: base if n is source else n)
                copy.meta = dict(view.meta)
                return copy

            _fetch_uses(graph, user, again)
        else:
            with graph.inserting_before(user):
                user.replace_input_with(source, make())


def _is_view(node: Node) -> bool:
    """Whether the node gives its first input's memory under another shape."""
    source = view_source(node)
    if source is None:
        return False
    value, result = source.meta.get("val"), node.meta.get("val")
    if node.target is operator.getitem:
        return _is_view(source) and isinstance(value, (list, tuple))
    # `to` is declared as an alias but may cast: a cast is a reader of its own.
    results = result if isinstance(result, (list, tuple)) else [result]
    return isinstance(value, torch.Tensor) and all(
        isinstance(r, torch.Tensor) and (r.dtype == value.dtype or op_name(node.target) in _DTYPE_VIEWS)
        for r in results
    )


def refuse_training(ep: ExportedProgram) -> None:
    for spec in ep.graph_signature.output_specs:
        if spec.kind in _GRADIENT_KINDS:
            raise TrainingGraphError(
                f"output {spec.arg.name!r} is a {spec.kind.name.lower().replace('_', ' ')}: the program trains. "
                "Export the forward pass alone"
            )
    for node in (node for graph in _graphs(ep.graph_module) for node in graph.nodes):
        if node.op == "call_function" and _trains(node):
            raise TrainingGraphError(
                f"{node.target} at {node.name!r} runs in training mode; call model.eval() before torch.export.export"
            )


def _graphs(module: GraphModule) -> list[Graph]:
    """The module's graph and those of the bodies in it (branches, loops, no_grad regions)."""
    return [part.graph for part in module.modules() if isinstance(part, GraphModule)]


def _trains(node: Node) -> bool:
    """Whether the op drops values at random, or takes and updates statistics, as it would only do in training."""
    if namespace(node.target) != "aten":
        return False
    given = arguments(node)
    if given.get("dropout_p"):  # attention
        return True
    if not any(given.get(flag) for flag in ("train", "training", "use_input_stats")):
        return False
    if "eps" in given:
        # A norm that tracks no running statistics uses those of the batch in eval mode, too.
        return given.get("running_mean") is not None
    return bool(given.get("p", given.get("dropout", 1)) != 0)
