"""Which states are the host side of a KV cache: with a GPU they stay in host memory, and kernels reach them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node

from penstock.errors import UnsupportedProgramError
from penstock.export.offload import placeholders
from penstock.ops import FETCH
from penstock.torch_private.functionalized import before_call, called_op, called_with
from penstock.torch_private.graph import view_source
from penstock.weight import CACHE_DIMS

# The ops of penstock.kv.ops, by name: the program that is read here may come from a file.
HOST_SIDE_OPS = ("penstock::kv_append", "penstock::kv_attend")


def host_states(ep: ExportedProgram) -> frozenset[str]:
    """Names of the buffers that some op takes as the host side of a KV cache."""
    return frozenset(buffer for _, _, buffer in _host_sides(ep) if buffer is not None)


def check_host_sides(ep: ExportedProgram, device: torch.device, states: frozenset[str]) -> None:
    """Refuse a host side that would end up in GPU memory, past the cache's cap: only state is kept on the host."""
    if device.type != "cuda":
        return
    for body in ep.graph_module.modules():
        inside = body is not ep.graph_module and isinstance(body, GraphModule)
        for node in body.graph.nodes if inside else ():
            if called_op(node) in HOST_SIDE_OPS:
                raise UnsupportedProgramError(
                    f"{called_op(node)} at {node.name!r} stands inside control flow, where it cannot be seen which "
                    "state is the host side of its KV cache; call it outside"
                )
    for call, side, buffer in _host_sides(ep):
        if buffer is None:
            raise UnsupportedProgramError(
                f"{called_op(call)} at {call.name!r}: the host side of its KV cache is {side.name!r}, which is no "
                "buffer of the program and so would lie on the GPU; use a penstock.kv.HostKVCache that the model owns"
            )
        if buffer not in states:
            raise UnsupportedProgramError(
                f"{called_op(call)} at {call.name!r}: the host side of its KV cache, {buffer!r}, is written by no "
                "method, which makes it a weight that is copied to the GPU; compile the method that appends to it, too"
            )


def _host_sides(ep: ExportedProgram) -> Iterator[tuple[Node, Node, str | None]]:
    """For each op with a host side: its call, where that memory comes from, and which buffer of the program it is."""
    targets = {spec.arg.name: spec.target for spec in ep.graph_signature.input_specs}
    for node in ep.graph.nodes:
        if node.op == "call_function" and called_op(node) in HOST_SIDE_OPS:
            origin = memory_origin(called_with(node, "host_kv"))
            yield node, origin, targets.get(origin.name) if origin.op == "placeholder" else None


def split_at_load(methods: Mapping[str, ExportedProgram]) -> dict[str, str]:
    """Host side -> device side, for the caches that can be split anew at load. Each side is a buffer that our ops get
    as it is, always with the same other side, and that nothing else takes. So only our ops know its sizes.
    """
    pairs: dict[str, str] = {}
    unfit: set[str] = set()
    for ep in methods.values():
        targets = {spec.arg.name: spec.target for spec in ep.graph_signature.input_specs}
        for node in ep.graph.nodes:
            if node.op != "call_function" or called_op(node) not in HOST_SIDE_OPS:
                continue
            origins = [memory_origin(called_with(node, side)) for side in ("device_kv", "host_kv")]
            near, far = (targets.get(origin.name) if origin.op == "placeholder" else None for origin in origins)
            if near is None or far is None:
                unfit.update(name for name in (near, far) if name is not None)
            elif pairs.setdefault(far, near) != near:
                unfit.update((near, far))
    # Check every method, even one that calls none of our ops.
    sides = {*pairs, *pairs.values()}
    for ep in methods.values():
        nodes = placeholders(ep.graph)
        for spec in ep.graph_signature.input_specs:
            if spec.target in sides and not _is_ours_alone(ep, nodes[spec.arg.name]):
                unfit.add(spec.target)
    shared = {near for near in pairs.values() if list(pairs.values()).count(near) > 1}
    unfit |= shared | (pairs.keys() & set(pairs.values()))
    return {far: near for far, near in pairs.items() if not {far, near} & unfit}


def _is_ours_alone(ep: ExportedProgram, node: Node) -> bool:
    """Whether a buffer is only handed to our ops, whole, and written back."""
    value = node.meta["val"]
    if value.dim() != CACHE_DIMS or not value.is_contiguous():
        return False
    specs = ep.graph_signature.output_specs
    returned = {getattr(spec.arg, "name", None) for spec in specs if spec.kind is not OutputKind.BUFFER_MUTATION}
    for user in node.users:
        if user.op == "output":
            if node.name in returned:
                return False
        elif user.target is FETCH:
            if not _is_ours_alone(ep, user):
                return False
        elif called_op(user) not in HOST_SIDE_OPS:
            return False
    # After a call the memory has a new name.
    return all(
        _is_ours_alone(ep, result)
        for call in node.users
        if called_op(call) in HOST_SIDE_OPS
        for result in call.users
        if before_call(result) is node
    )


def memory_origin(node: Node) -> Node:
    """The node that first held this memory, found through views, fetches and calls that write."""
    while (earlier := _earlier(node)) is not None:
        node = earlier
    return node


def _earlier(node: Node) -> Node | None:
    if node.target is FETCH:
        return node.args[0]  # type: ignore[return-value]
    return before_call(node) or view_source(node)
