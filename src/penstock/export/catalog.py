"""The weights and states of a model over all its methods: every set of bytes once, with all its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from penstock.errors import MethodConflictError, UnsupportedProgramError
from penstock.export.host_states import host_states, split_at_load
from penstock.export.offload import WEIGHT_KINDS, mutated_targets
from penstock.export.values import equal_values, has_value
from penstock.layout import canonical
from penstock.torch_private.graph import storage_key
from penstock.weight import ITEM_BYTES, State, Weight


@dataclass
class Catalog:
    """Filled method by method; read-only afterwards."""

    weights: dict[str, Weight] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    # The program's tensor for each weight and state; may be on meta.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # (method, name in that method's program) -> name here.
    name_of: dict[tuple[str, str], str] = field(default_factory=dict)
    # Buffers that no checkpoint is expected to hold: non-persistent ones and lifted constants.
    transient: set[str] = field(default_factory=set)
    # Names in a state dict that no program takes as an input: a strict export leaves out what it never reads.
    unlisted: set[str] = field(default_factory=set)


def state_names(methods: Mapping[str, ExportedProgram]) -> frozenset[str]:
    """A buffer that any method writes is state in all methods: one method fills the cache that another one reads."""
    return frozenset().union(*(mutated_targets(ep) for ep in methods.values()))


def build_catalog(methods: Mapping[str, ExportedProgram]) -> Catalog:
    catalog = Catalog()
    states = state_names(methods)
    for method, ep in methods.items():
        groups: dict[tuple[object, ...], list[InputSpec]] = {}
        state_memory: set[tuple[object, ...]] = set()
        for spec in ep.graph_signature.input_specs:
            if spec.kind not in WEIGHT_KINDS:
                continue
            assert spec.target is not None
            tensor = _tensor(ep, spec)
            if spec.target in states:
                _add_state(catalog, method, spec, tensor)
                state_memory.add(_memory(tensor, spec.target))
            else:
                groups.setdefault(_memory(tensor, spec.target), []).append(spec)
        # A strict export keeps one input for a tied weight; its other names appear only in the state dict.
        listed = {spec.target for spec in ep.graph_signature.input_specs}
        further: dict[tuple[object, ...], list[str]] = {}
        for name, value in ep.state_dict.items():
            if name not in listed and isinstance(value, torch.Tensor):
                further.setdefault(_memory(value, name), []).append(name)
        for memory, specs in groups.items():
            tied = further.pop(memory, [])
            written = sorted(states.intersection(tied))
            if written:
                raise UnsupportedProgramError(
                    f"{specs[0].target!r} in method {method!r} and {written[0]!r} are one buffer, which another method "
                    "writes under the second name; give it one name"
                )
            _add_weight(catalog, method, ep, specs, tied)
        catalog.unlisted.update(n for memory, names in further.items() if memory not in state_memory for n in names)
    catalog.unlisted -= {name for weight in catalog.weights.values() for name in weight.names} | set(catalog.states)
    _refuse_shared_memory(catalog)
    for ep in methods.values():
        for name in host_states(ep) & states:
            catalog.states[name] = replace(catalog.states[name], host=True)
    for far, near in split_at_load(methods).items():
        if {far, near} <= states:
            catalog.states[far] = replace(catalog.states[far], near=near)
    return catalog


def _tensor(ep: ExportedProgram, spec: InputSpec) -> torch.Tensor:
    assert spec.target is not None
    value = ep.state_dict.get(spec.target, ep.constants.get(spec.target))
    if not isinstance(value, torch.Tensor):
        raise UnsupportedProgramError(f"{spec.target!r} has no tensor in the program (found {type(value).__name__})")
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and has_value(value):
        raise UnsupportedProgramError(
            f"{spec.target!r} is a {type(value).__name__}, not a plain tensor; apply_weight_offload flattens such "
            "weights"
        )
    if _dtype(value) not in ITEM_BYTES:
        raise UnsupportedProgramError(f"{spec.target!r} has dtype {_dtype(value)}, which has no whole-byte elements")
    if value.layout is not torch.strided:
        raise UnsupportedProgramError(
            f"{spec.target!r} has layout {value.layout}; only strided tensors can be offloaded"
        )
    return value


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _memory(tensor: torch.Tensor, name: str) -> tuple[object, ...]:
    """Equal for the names of one tied weight."""
    if tensor.numel() == 0:
        return (name,)
    return (storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _weight(name: str, tensor: torch.Tensor, aliases: tuple[str, ...]) -> Weight:
    return Weight(
        name=name,
        dtype=_dtype(tensor),
        shape=tuple(tensor.shape),
        dim_order=canonical(tensor.shape, tensor.stride()),
        aliases=aliases,
    )


def _transient(spec: InputSpec) -> bool:
    return spec.kind is InputKind.CONSTANT_TENSOR or (spec.kind is InputKind.BUFFER and not spec.persistent)


def _add_weight(catalog: Catalog, method: str, ep: ExportedProgram, specs: list[InputSpec], further: list[str]) -> None:
    names = [spec.target for spec in specs if spec.target is not None] + further
    tensor = _tensor(ep, specs[0])
    transient = all(_transient(spec) for spec in specs)
    known = {n.name for n in catalog.weights.values() if set(n.names) & set(names)}
    if len(known) > 1:
        raise MethodConflictError(
            f"method {method!r} ties {', '.join(names)}, which other methods hold as separate weights"
        )
    if known:
        name = known.pop()
        if _same(catalog.weights[name], catalog.tensors[name], tensor):
            merged = dict.fromkeys([*catalog.weights[name].names, *names])
            del merged[name]
            catalog.weights[name] = replace(catalog.weights[name], aliases=tuple(merged))
        elif transient:
            # Every program numbers its constants from scratch: equal names say nothing.
            name = f"{method}.{names[0]}"
            if name in catalog.weights:
                raise MethodConflictError(f"two weights would be named {name!r}; rename the method or the buffer")
            catalog.weights[name] = _weight(name, tensor, ())
            catalog.tensors[name] = tensor
        else:
            raise MethodConflictError(
                f"weight {names[0]!r} in method {method!r} differs from the one of that name in an earlier method "
                f"(here {_dtype(tensor)} {list(tensor.shape)}, there {catalog.weights[name].dtype} "
                f"{list(catalog.weights[name].shape)}, or other values); methods of one model share their weights"
            )
    else:
        name = names[0]
        catalog.weights[name] = _weight(name, tensor, tuple(names[1:]))
        catalog.tensors[name] = tensor
    if transient:
        catalog.transient.add(name)
    catalog.name_of.update(((method, target), name) for target in names)


def _same(weight: Weight, known: torch.Tensor, tensor: torch.Tensor) -> bool:
    if weight.dtype != _dtype(tensor) or weight.shape != tuple(tensor.shape):
        return False
    if weight.dim_order != canonical(tensor.shape, tensor.stride()):
        return False
    if _memory(known, "") == _memory(tensor, ""):
        return True
    if not has_value(known) or not has_value(tensor):
        return has_value(known) == has_value(tensor)  # nothing to compare: the name decides
    return equal_values(known, tensor)


def _add_state(catalog: Catalog, method: str, spec: InputSpec, tensor: torch.Tensor) -> None:
    assert spec.target is not None
    order = canonical(tensor.shape, tensor.stride())
    found = State(spec.target, _dtype(tensor), tuple(tensor.shape), order, init="stored")
    known = catalog.states.get(spec.target)
    if known is None:
        catalog.states[spec.target] = found
        catalog.tensors[spec.target] = tensor
    elif known != found or not _same(
        _weight(known.name, catalog.tensors[known.name], ()), catalog.tensors[known.name], tensor
    ):
        raise MethodConflictError(
            f"state {spec.target!r} in method {method!r} ({found.dtype} {list(found.shape)}) differs from the one of "
            f"that name in an earlier method ({known.dtype} {list(known.shape)}, or other first values)"
        )
    if _transient(spec):
        catalog.transient.add(spec.target)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte of the tensor inside its storage."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _refuse_shared_memory(catalog: Catalog) -> None:
    """A weight (or another state) that shares bytes with a state would change under the program's feet."""
    placed: dict[int, list[tuple[int, int, str]]] = {}
    for name in (*catalog.weights, *catalog.states):
        tensor = catalog.tensors[name]
        if not tensor.numel():
            continue
        start, end = _span(tensor)
        others = placed.setdefault(storage_key(tensor), [])
        for other_start, other_end, other in others:
            if name in catalog.states and start < other_end and other_start < end:
                raise UnsupportedProgramError(f"{name!r} and {other!r} share memory, and the program writes {name!r}")
        others.append((start, end, name))
