"""Rules between the parts of a program's description. The schema checks types.

A refusal names what breaks the rule, what it has and what it needs. Counts are bounded, so that no file keeps its
reader busy forever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import PackageError, ScheduleError
from penstock.nesting import parse_call, parse_nesting
from penstock.plan.floor import check_schedules
from penstock.printable import printable
from penstock.runtime.symbolic_layout import SymbolicLayout
from penstock.schema import HIGHEST
from penstock.weight import (
    CACHE_DIMS,
    EXPERT_UNIT_BYTES,
    ITEM_BYTES,
    MOST_EXPERTS,
    POSITIONS_DIM,
    State,
    Weight,
    are_experts,
)
from penstock.weights.format import layout_fault
from penstock.weights.identity import layout_identity

if TYPE_CHECKING:
    from penstock.program import ConstantSpec, Method, Program, Signature, TensorSpec

DEVICES = ("cpu", "cuda")
INITS = ("zeros", "stored")
# How much one description may make its reader work through; far beyond any model.
SYMBOLS_LIMIT = 256
EXPRESSIONS_LIMIT = 10_000
LIFETIMES_LIMIT = 1 << 22
TEXT_LIMIT = 500

_METHOD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_program(program: Program) -> None:
    if not program.methods:
        _refuse("it has no method")
    if program.device not in DEVICES:
        _refuse(f"its device is {_quoted(program.device)}, needs to be one of {', '.join(DEVICES)}")
    _check_stored(program.weights, program.states)
    _check_caches(program.states)
    identity = layout_identity(program.weights, program.states)
    if program.identity != identity:
        _refuse(f"its identity is {_quoted(program.identity)}, its weights and states need {identity}")
    _unique("method", (method.name for method in program.methods))
    _unique("unused name", program.unused)
    _check_schedules(program)
    for method in program.methods:
        _check_method(method, program)
    expressions = sum(isinstance(size, str) for method in program.methods for size in _sizes(method.signature))
    if expressions > EXPRESSIONS_LIMIT:
        _refuse(f"it has {expressions} dynamic sizes and strides, needs at most {EXPRESSIONS_LIMIT}")
    for method in program.methods:
        _within(method.name, lambda method=method: check_signature(method.signature))


def check_signature(signature: Signature) -> None:
    """Sizes must follow from inputs, each size needs a stride, and there must be as many leaves as values."""
    if len(signature.symbols) > SYMBOLS_LIMIT:
        _refuse(f"it has {len(signature.symbols)} symbols, needs at most {SYMBOLS_LIMIT}")
    for name, (low, high) in signature.symbols.items():
        if high is not None and high < low:
            _refuse(f"symbol {_quoted(name)} has the range {low} to {high}, needs one that holds something")
    _unique("input", (spec.name for spec in signature.inputs))
    _unique("written name", signature.written)
    tensors = [spec for spec in signature.inputs if _is_tensor(spec)]
    for name in signature.written:
        if name not in {spec.name for spec in tensors}:
            _refuse(f"it writes {_quoted(name)}, which is not a tensor among its inputs")
    for spec in (*signature.inputs, *signature.outputs):
        if _is_tensor(spec):
            check_tensor(spec)  # type: ignore[arg-type]
    SymbolicLayout(tensors, signature.symbols)  # type: ignore[arg-type]
    parse_call(signature.in_spec, len(signature.inputs))
    parse_nesting(signature.out_spec, len(signature.outputs))


def _is_tensor(spec: TensorSpec | ConstantSpec) -> bool:
    return spec.KIND == "tensor"


def check_tensor(spec: TensorSpec) -> None:
    if spec.dtype not in ITEM_BYTES:
        _refuse(f"{_quoted(spec.name)} has dtype {_quoted(spec.dtype)}, needs one of {', '.join(ITEM_BYTES)}")
    if len(spec.shape) != len(spec.strides):
        _refuse(f"{_quoted(spec.name)} has {len(spec.shape)} sizes and {len(spec.strides)} strides, needs as many")
    for size in (*spec.shape, *spec.strides):
        if isinstance(size, str) and len(size) > TEXT_LIMIT:
            _refuse(f"{_quoted(spec.name)} has a size of {len(size)} characters, needs at most {TEXT_LIMIT}")
    for index in spec.indexes:
        if index.low > index.high:
            _refuse(
                f"{_quoted(spec.name)} indexes from {index.low} to {index.high}, needs a range that holds something"
            )
        if index.region and len(index.region) != len(spec.shape):
            _refuse(f"{_quoted(spec.name)} has {len(spec.shape)} sizes, needs as many parts of what indexes")
        if any(step < 1 for _, _, step in index.region):
            _refuse(f"{_quoted(spec.name)} has a step of 0 in what indexes, needs at least 1")


def _sizes(signature: Signature) -> Iterable[int | str]:
    for spec in (*signature.inputs, *signature.outputs):
        if _is_tensor(spec):
            yield from spec.shape  # type: ignore[union-attr]
            yield from spec.strides  # type: ignore[union-attr]


def _check_stored(weights: Iterable[Weight], states: Iterable[State]) -> None:
    items: list[Weight | State] = [*weights, *states]
    _unique("weight or state", (name for w in items for name in (w.names if isinstance(w, Weight) else (w.name,))))
    total_bytes = 0
    for item in items:
        kind = "weight" if isinstance(item, Weight) else "state"
        fault = layout_fault(item.dtype, item.shape, item.dim_order)
        if fault is not None:
            _refuse(f"{kind} {_quoted(item.name)} {printable(fault)}")
        if isinstance(item, State) and item.init not in INITS:
            _refuse(f"state {_quoted(item.name)} begins as {_quoted(item.init)}, needs one of {', '.join(INITS)}")
        total_bytes += item.nbytes
        if total_bytes > HIGHEST:
            _refuse(f"up to {kind} {_quoted(item.name)} its tensors have {total_bytes} bytes, needs at most {HIGHEST}")


def _check_caches(states: Iterable[State]) -> None:
    by_name = {state.name: state for state in states}
    far = [state for state in by_name.values() if state.near is not None]
    _unique("state before a host side", (state.near for state in far if state.near is not None))
    for state in far:
        near = by_name.get(state.near or "")
        if near is None or near.host or near.near is not None or not state.host:
            _refuse(
                f"state {_quoted(state.name)} goes on from {_quoted(state.near or '')}, which is not a state on the "
                "device"
            )
        plain = tuple(range(CACHE_DIMS))
        if (
            near.dtype != state.dtype
            or not near.dim_order == state.dim_order == plain
            or any(near.shape[d] != state.shape[d] for d in plain if d != POSITIONS_DIM)
        ):
            _refuse(f"state {_quoted(state.name)} goes on from {_quoted(near.name)}, which is not like it")


def _check_schedules(program: Program) -> None:
    weights = {weight.name: weight for weight in program.weights}
    try:
        check_schedules([method.schedule for method in program.methods], weights, granularity_bytes=1)
    except ScheduleError as error:
        _refuse(printable(str(error)))
    for access in (access for method in program.methods for access in method.schedule.accesses):
        if access.routing is not None and (
            access.pinned or not access.gathered or not are_experts(weights[access.weight])
        ):
            _refuse(
                f"access {access.number} takes experts of {_quoted(access.weight)}, needs one that is only taken by "
                f"index, and 1 to {MOST_EXPERTS} rows of a multiple of {EXPERT_UNIT_BYTES} bytes"
            )
    lived = 0
    for method in program.methods:
        first, last = method.schedule.first_step, method.schedule.last_step
        lived += sum(last[number] - first[number] + 1 for number in first)
    if lived > LIFETIMES_LIMIT:
        _refuse(f"its accesses live for {lived} steps together, needs at most {LIFETIMES_LIMIT}")


def _check_method(method: Method, program: Program) -> None:
    if not _METHOD_NAME.fullmatch(method.name):
        _refuse(f"method {_quoted(method.name)} needs a name of letters, digits and underscores")
    where = f"method {method.name!r}"
    _unique(f"state of {where}", method.states)
    for name in method.states:
        if name not in {state.name for state in program.states}:
            _refuse(f"{where} has the state {_quoted(name)}, which is none of the program's")
    weights = {weight.name for weight in program.weights}
    for temporary in method.temporaries:
        for name in temporary.weights:
            if name not in weights:
                _refuse(f"{where} computes {_quoted(temporary.name)} from {_quoted(name)}, which is no weight")


def _within(method: str, check: object) -> None:
    assert callable(check)
    try:
        check()
    except PackageError as error:
        text = str(error).removeprefix("the offload metadata is damaged: ")
        _refuse(f"method {method!r}: {text}")


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            _refuse(f"the {what} {_quoted(name)} is there twice, needs every name once")
        seen.add(name)


def _quoted(text: str) -> str:
    return repr(printable(text if len(text) <= 80 else text[:80] + "..."))


def _refuse(text: str) -> NoReturn:
    raise PackageError(f"the offload metadata is damaged: {text}")
