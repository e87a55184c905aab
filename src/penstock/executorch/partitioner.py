"""Which ops go to our delegate: all of them, except those that are left to ExecuTorch's own kernels by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import get_non_lowered_nodes, tag_constant_data
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from penstock.budget import parse_bytes
from penstock.errors import NotOffloadedError, ProgramError, UnsupportedProgramError
from penstock.executorch.backend import PenstockBackend
from penstock.executorch.dialect import is_fetch, plain_op
from penstock.executorch.lowering_request import ConstantMethods, LoweringRequest
from penstock.export.offload import WEIGHT_KINDS, mutated_targets, placeholders
from penstock.torch_private.graph import OpOverload, gives_view, higher_order_name, op_name

TAG = "delegation_tag"


class CudaPartitioner(Partitioner):  # type: ignore[misc]
    """For `to_edge_transform_and_lower`: compiles programs of penstock.apply_weight_offload without their weights.

    device                 "cuda" (also "cuda:1") or "cpu": what the delegates are compiled for and run on
    weight_offload_budget  a default budget to bake in, in bytes or like "8GiB", for the whole program
    inductor_configs       further options for torch._inductor.config
    leave                  ops to leave to ExecuTorch's kernels, by their names in the lowered program, as in
                           "aten::softmax" (which also stands for its "aten::_softmax")
    tied                   the names of each weight that has several: lowering keeps an arbitrary one. With this option
                           the .ptd has them all, and also serves a .pt2 of the same model
    leave_states           state to leave in ExecuTorch's own memory, by name; the rest lies in the delegates' if it can
    weights                where the values come from, if not from the program (a model on meta): as penstock.compile
                           takes it
    split_linear           as penstock.compile takes it

    Pass `constant_methods` to `to_edge_transform_and_lower`, too: lowering puts the floor and the access order there,
    and the program then has them as methods.
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        weight_offload_budget: int | str | None = None,
        inductor_configs: Mapping[str, Any] | None = None,
        leave: Iterable[str] = (),
        tied: Iterable[Sequence[str]] = (),
        leave_states: Iterable[str] = (),
        weights: Any = None,
        split_linear: bool = False,
    ) -> None:
        options = {
            "device": device,
            "budget_bytes": None if weight_offload_budget is None else parse_bytes(weight_offload_budget),
            "inductor_configs": dict(inductor_configs or {}),
            "tied": [list(names) for names in tied],
            "split_linear": split_linear,
        }
        self.constant_methods = ConstantMethods()
        self._leave = frozenset(map(_stem, leave))
        self._seen: set[str] = set()
        # States, by what the methods so far made of them: a state has one place for all methods.
        self._asked_states = frozenset(leave_states)
        self._left_states = set(self._asked_states)
        self._states: set[str] = set()
        self._owned: set[str] = set()
        request = LoweringRequest(options, self.constant_methods, weights, self._check_names)
        self.delegation_spec = DelegationSpec(PenstockBackend.__name__, [request.compile_spec()])

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[torch.fx.Node], bool] | None]:
        """Everything that we compile: Inductor decomposes by its own rules, as it does for a .pt2."""
        targets = {node.target for node in ep.graph.nodes if node.op == "call_function"}
        return [op for op in targets if isinstance(op, OpOverload) and _stem(str(op_name(op))) not in self._leave], None

    def _check_names(self) -> None:
        for option, thing, named, seen in (
            ("leave", "op", self._leave, self._seen),
            ("leave_states", "state", self._asked_states, self._states),
        ):
            if absent := sorted(named - seen):
                raise ProgramError(
                    f"{option}: the lowered program has no {thing} {', '.join(absent)}; it has "
                    f"{', '.join(sorted(seen)) or 'none'}"
                )

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        if not any(is_fetch(node) for node in exported_program.graph.nodes):
            raise NotOffloadedError(
                "the program fetches no weight, so it would be lowered without any budget: apply "
                "penstock.apply_weight_offload before lowering"
            )
        candidates = set(get_non_lowered_nodes(exported_program.graph))
        leave = self._leave
        self._seen |= {name for node in candidates for name in _names(node)}

        class Support(OperatorSupportBase):
            def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
                return node in candidates and not _names(node) & leave

        # Partitions must be convex: one tag over everything would close a cycle through an op that is left out.
        proposed = CapabilityBasedPartitioner(
            exported_program.graph_module, Support(), allows_single_node_partition=True
        ).propose_partitions()
        for partition in proposed:
            for node in partition.nodes:
                node.meta[TAG] = f"penstock_{partition.id}"
        _follow_readers(exported_program)
        _tag_bodies(exported_program)
        _drop_weightless(exported_program)
        tag_constant_data(exported_program)
        self._place_states(exported_program)
        tags = dict.fromkeys(node.meta[TAG] for node in exported_program.graph.nodes if TAG in node.meta)
        return PartitionResult(exported_program, dict.fromkeys(tags, self.delegation_spec))

    def _place_states(self, ep: ExportedProgram) -> None:
        """A state goes to the delegate that reads and writes it. If that is not one, ExecuTorch keeps the state."""
        nodes = placeholders(ep.graph)
        written = mutated_targets(ep)
        self._states |= set(written)
        owners = state_owners(ep)
        for spec in ep.graph_signature.input_specs:
            if spec.kind not in WEIGHT_KINDS or spec.target is None:
                continue
            node, name = nodes[spec.arg.name], spec.target
            if name in written:
                node.meta.pop(TAG, None)
                if name in owners and name not in self._left_states:
                    node.meta[TAG] = owners[name]
                    self._owned.add(name)
                else:
                    self._left_states.add(name)
            elif name in self._left_states:  # which another method writes
                node.meta.pop(TAG, None)
                # Its fetches stay outside, too, and erase_fetches removes them: a partitioner must change no graph.
                for fetch in [user for user in node.users if is_fetch(user)]:
                    fetch.meta.pop(TAG, None)
            else:
                # Owned as a weight, or as state if another method has it as state.
                self._owned.add(name)
        torn = sorted(self._owned & self._left_states)
        if torn:
            raise TornStateError(torn)


class TornStateError(UnsupportedProgramError):
    """State that lies in the delegate of one method, but cannot lie in that of another."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{', '.join(names)}: one method reads and writes this state in one delegate, another one cannot; give "
            f"CudaPartitioner leave_states={list(names)!r}"
        )
        self.names = tuple(names)


def state_owners(ep: ExportedProgram) -> dict[str, str]:
    """State -> tag of the only delegate that reads it and computes its next value, which nobody else reads."""
    nodes = placeholders(ep.graph)
    outputs = ep.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    next_values = {
        spec.target: output
        for spec, output in zip(ep.graph_signature.output_specs, outputs, strict=True)
        if spec.kind is OutputKind.BUFFER_MUTATION
    }
    owners: dict[str, str] = {}
    for spec in ep.graph_signature.input_specs:
        value = next_values.get(spec.target) if spec.target is not None else None
        if value is None or spec.target is None:
            continue
        readers = [*nodes[spec.arg.name].users, *(user for user in value.users if user.op != "output"), value]
        tags = {node.meta.get(TAG) for node in readers}
        tag = tags.pop()
        # A next value that is also returned makes two outputs of one, which ExecuTorch's lowering does not take.
        if not tags and tag is not None and list(outputs).count(value) == 1:
            owners[spec.target] = tag
    return owners


def _stem(name: str) -> str:
    """The name without the underscore that an op's functional form may carry."""
    namespace, found, stem = name.partition("::")
    if not found:
        raise ProgramError(f"{name!r} is not an op; name it with its namespace, as in 'aten::softmax'")
    return f"{namespace}::{stem.lstrip('_')}"


def _names(node: Node) -> set[str]:
    """The op's own name, and the name of the view that it copies."""
    target = node.target._op if isinstance(node.target, EdgeOpOverload) else node.target
    if not isinstance(target, OpOverload):
        return set()
    return {_stem(str(op_name(op))) for op in (target, plain_op(target))}


def _is_view(node: Node) -> bool:
    return isinstance(node.target, EdgeOpOverload) and gives_view(plain_op(node.target._op))


def _follow_readers(ep: ExportedProgram) -> None:
    """Puts a fetch, and the views between it and its reader, where the reader is: a weight is no activation."""
    lent: set[Node] = set()
    for node in ep.graph.nodes:
        if is_fetch(node) or (_is_view(node) and node.args[0] in lent):
            lent.add(node)
    for node in reversed(list(ep.graph.nodes)):
        if node in lent:
            if any(user.target is executorch_call_delegate for user in node.users):
                raise UnsupportedProgramError(
                    f"{node.name!r} lends a weight to a delegate of another backend, which would keep it outside of "
                    "the budget: put CudaPartitioner first"
                )
            tags = {user.meta.get(TAG) for user in node.users}
            tag = tags.pop() if len(tags) == 1 else None
            if tag is not None:
                node.meta[TAG] = tag
            elif any(user.op == "output" for user in node.users):
                continue  # a returned weight stays where it was put, and is copied out of the ring
            else:
                node.meta.pop(TAG, None)


def _tag_bodies(ep: ExportedProgram) -> None:
    """Branches and loops carry their bodies as attributes, which must go where the op goes."""
    for node in ep.graph.nodes:
        if node.op == "get_attr":
            for user in node.users:
                if higher_order_name(user.target) is not None and TAG in user.meta:
                    node.meta[TAG] = user.meta[TAG]


def _drop_weightless(ep: ExportedProgram) -> None:
    """Partitions that read no weight are left to ExecuTorch: there is nothing in them to offload."""
    reading = {node.meta[TAG] for node in ep.graph.nodes if TAG in node.meta and is_fetch(node)}
    for node in ep.graph.nodes:
        if TAG in node.meta and node.meta[TAG] not in reading:
            del node.meta[TAG]
