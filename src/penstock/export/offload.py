"""The pass: a fetch op in front of every use of every weight."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import Graph, Node

from penstock.errors import (
    AlreadyOffloadedError,
    NotAProgramError,
    NoWeightsError,
    TrainingGraphError,
)
from penstock.export.ops import FETCH

WEIGHT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
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
    # weights still are tensor subclasses. Functionalising names the first and flattens the second.
    program = ep.run_decompositions({})
    lend_weights(program)
    if not fetches(program.graph):
        unused = ", ".join(spec.target or "?" for spec in weight_specs(program)) or "none"
        raise NoWeightsError(f"the program reads no weight (parameters and buffers it never reads: {unused})")
    return program


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


def lend_weights(ep: ExportedProgram) -> None:
    """Put a fetch in front of every use of a weight that has none yet, in place.

    Constants that appear after the pass (a later decomposition may lift some) get theirs when this is called again.
    """
    graph = ep.graph
    numbers = iter(range(1 + max((int(node.args[1]) for node in fetches(graph)), default=-1), 1 << 62))  # type: ignore[arg-type]
    nodes = placeholders(graph)
    for spec in weight_specs(ep):
        assert spec.target is not None
        _lend(graph, nodes[spec.arg.name], spec.target, numbers)
    # Views that every consumer now has its own copy of. Written by hand, because removing dead code in general could
    # also drop what the program's signature still names.
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and _is_view(node):
            graph.erase_node(node)
    # A returned weight is now a fetch of it: the signature names outputs by node.
    for output, output_spec in zip(graph.output_node().args[0], ep.graph_signature.output_specs, strict=True):  # type: ignore[arg-type]
        if isinstance(output_spec.arg, TensorArgument) and isinstance(output, Node):
            output_spec.arg = TensorArgument(name=output.name)
    graph.lint()
    ep.graph_module.recompile()


def _lend(graph: Graph, weight: Node, name: str, numbers: Iterator[int]) -> None:
    def fetch() -> Node:
        node = graph.call_function(FETCH, (weight, next(numbers), name))
        node.meta["val"] = FETCH(weight.meta["val"], node.args[1], name)
        return node

    _lend_uses(graph, weight, fetch)


def _lend_uses(graph: Graph, source: Node, make: Callable[[], Node]) -> None:
    """Give each consumer of `source`, also of views of it, a fetch of its own right before itself.

    One fetch for two uses that lie far apart (a tied embedding, a transpose made once) would hold the weight all the
    way between them.
    """
    for user in list(source.users):
        if user.target is FETCH:
            continue
        if _is_view(user) and user.args[0] is source and user.all_input_nodes.count(source) == 1:

            def again(view: Node = user) -> Node:
                base = make()
                copy = graph.node_copy(view, lambda n: base if n is source else n)
                copy.meta = dict(view.meta)
                return copy

            _lend_uses(graph, user, again)
        else:
            with graph.inserting_before(user):
                user.replace_input_with(source, make())


def _is_view(node: Node) -> bool:
    """Whether the node gives its first input's memory under another shape."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0]) and isinstance(node.args[0].meta.get("val"), (list, tuple))
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    aliases = [r.alias_info for r in schema.returns]
    if not aliases or any(alias is None or alias.is_write for alias in aliases):
        return False
    # `to` is declared as an alias but may cast: a cast is a reader of its own.
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    results = result if isinstance(result, (list, tuple)) else [result]
    return isinstance(source, torch.Tensor) and all(
        isinstance(r, torch.Tensor) and r.dtype == source.dtype for r in results
    )


def refuse_training(ep: ExportedProgram) -> None:
    for spec in ep.graph_signature.output_specs:
        if spec.kind in _GRADIENT_KINDS:
            raise TrainingGraphError(
                f"output {spec.arg.name!r} is a {spec.kind.name.lower().replace('_', ' ')}: the program trains. "
                "Export the forward pass alone"
            )
    for node in ep.graph.nodes:
        if node.op == "call_function" and _trains(node):
            raise TrainingGraphError(
                f"{node.target} at {node.name!r} runs in training mode; call model.eval() before torch.export.export"
            )


# Op name -> the argument that says whether it trains.
_TRAINING_ARGUMENT = {
    "aten::dropout": "train",
    "aten::native_dropout": "train",
    "aten::feature_dropout": "train",
    "aten::alpha_dropout": "train",
    "aten::feature_alpha_dropout": "train",
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::_native_batch_norm_legit": "training",
    "aten::_native_batch_norm_legit_functional": "training",
    "aten::cudnn_batch_norm": "training",
}


def _trains(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    flag = _TRAINING_ARGUMENT.get(schema.name)
    if flag is None:
        return False
    position = next(i for i, a in enumerate(schema.arguments) if a.name == flag)
    value = node.args[position] if position < len(node.args) else node.kwargs.get(flag)
    if schema.name in ("aten::batch_norm", "aten::_native_batch_norm_legit_functional"):
        # Statistics of the batch without running statistics are how an eval-mode norm without tracking works.
        return bool(value) and node.args[3] is not None
    return bool(value) and (schema.name.endswith("batch_norm") or _dropout_probability(node) > 0)


def _dropout_probability(node: Node) -> float:
    value = node.args[1] if len(node.args) > 1 else 0.5
    return float(value) if isinstance(value, (int, float)) else 1.0
