"""The C interface of the delegate library, with types. csrc/module_api.cpp is the other side."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import InputError, PackageError
from penstock.executorch.description import Description
from penstock.executorch.failures import failure
from penstock.executorch.library import load_library
from penstock.executorch.payload import checked_description
from penstock.runtime.budget_choice import SOURCES
from penstock.weights.format import SCALAR_TYPES

_pointer = ctypes.c_void_p
_text = ctypes.c_char_p
_i32 = ctypes.c_int32
_i64 = ctypes.c_int64


class Value(ctypes.Structure):
    _fields_ = [
        ("kind", _i32),
        ("scalar_type", _i32),
        ("rank", _i64),
        ("sizes", ctypes.POINTER(_i64)),
        ("strides", ctypes.POINTER(_i64)),
        ("data", _pointer),
        ("integer", _i64),
        ("number", ctypes.c_double),
    ]


_NONE, _TENSOR, _INT, _FLOAT, _BOOL, _STRING = range(6)

_VISIT_VALUE = ctypes.CFUNCTYPE(None, ctypes.POINTER(Value))
_VISIT_TEXT = ctypes.CFUNCTYPE(None, _text)
_VISIT_PAYLOAD = ctypes.CFUNCTYPE(None, _pointer, _i64, _pointer, _i64)

_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "penstock_executorch_kind": (_i32, []),
    "penstock_executorch_detail": (_i64, []),
    "penstock_executorch_text": (_text, []),
    "penstock_executorch_open": (_i32, [_text, ctypes.POINTER(_text), _i64, _text, _text, ctypes.POINTER(_pointer)]),
    "penstock_executorch_close": (None, [_pointer]),
    "penstock_executorch_methods": (_i32, [_pointer, _VISIT_TEXT]),
    "penstock_executorch_load_method": (_i32, [_pointer, _text]),
    "penstock_executorch_execute": (_i32, [_pointer, _text, ctypes.POINTER(Value), _i64, _VISIT_VALUE]),
    "penstock_executorch_states": (_i32, [_pointer, _text, _VISIT_TEXT]),
    "penstock_executorch_state": (_i32, [_pointer, _text, _text, _VISIT_VALUE]),
    "penstock_executorch_payloads": (_i32, [_pointer, _VISIT_PAYLOAD]),
    "penstock_executorch_share_session": (_i32, [_text, _pointer, _i32, ctypes.POINTER(_i64), _i64]),
    "penstock_executorch_share_states": (_i32, [_text, _text, _i32, ctypes.POINTER(Value), _i64]),
    "penstock_executorch_reclaim": (None, [_text]),
    "penstock_executorch_read_state": (_i32, [_text, _text, _pointer, _i64]),
    "penstock_executorch_write_state": (_i32, [_text, _text, _pointer, _i64]),
    "penstock_executorch_reset_state": (_i32, [_text]),
    "penstock_executorch_session": (_pointer, [_text, ctypes.POINTER(_i64)]),
}


@functools.cache
def library() -> ctypes.CDLL:
    loaded = load_library()
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


@functools.cache
def _scalar_types() -> dict[int, torch.dtype]:
    return {number: getattr(torch, name) for name, number in SCALAR_TYPES.items() if hasattr(torch, name)}


@functools.cache
def _scalar_numbers() -> dict[torch.dtype, int]:
    return {dtype: number for number, dtype in _scalar_types().items()}


@dataclass(frozen=True)
class Payload:
    """A program of ours inside a .pte."""

    description: Description
    # A .pt2 whose methods are the delegates.
    code: bytes

    @property
    def weight_names(self) -> list[list[str]]:
        """All names of each weight."""
        return [list(weight.names) for weight in self.description.weights]

    @property
    def delegates(self) -> list[str]:
        return [method.name for method in self.description.methods]

    @property
    def states(self) -> list[str]:
        return [state.name for state in self.description.states]

    def transfer_bytes(self, delegates: Sequence[str]) -> int:
        """Pinned memory that these delegates allocate for the inputs and outputs of their runs."""
        return sum(method.transfer_bytes for method in self.description.methods if method.name in delegates)

    def states_of(self, method: str) -> list[str]:
        """States of all delegates of one method of the .pte."""
        part = re.compile(rf"{re.escape(method)}(__\d+)?")
        rows = [row for row in self.description.methods if part.fullmatch(row.name)]
        return [self.states[number] for row in rows for number in row.states]


@dataclass(frozen=True)
class SessionFacts:
    """What delegates that share no session of ours chose. `plan`: the number of the plan in the file that they took."""

    floor_bytes: int
    full_bytes: int
    budget_bytes: int
    asked_bytes: int
    source: str
    plan: int
    plan_count: int
    plan_bytes: int


class NativeModule:
    """ExecuTorch's C++ Module. Everything raises one of Penstock's errors."""

    def __init__(self, program: str, data_files: Sequence[str], budget: str | None, group: str) -> None:
        self._library = library()
        self._group = group.encode()
        self._handle: int | None = None
        files = (_text * max(1, len(data_files)))(*(name.encode() for name in data_files))
        out = _pointer()
        given = None if budget is None else budget.encode()
        self._check(
            f"loading {program}",
            self._library.penstock_executorch_open(
                program.encode(), files, len(data_files), given, self._group, ctypes.byref(out)
            ),
        )
        self._handle = out.value

    def method_names(self) -> list[str]:
        names: list[str] = []
        visit = _VISIT_TEXT(lambda name: names.append(name.decode()))
        self._check("listing the methods", self._library.penstock_executorch_methods(self._handle, visit))
        return sorted(names)

    def load_method(self, name: str) -> None:
        status = self._library.penstock_executorch_load_method(self._handle, name.encode())
        self._check(f"loading method {name!r}", status)

    def execute(self, method: str, inputs: Sequence[Any]) -> list[Any]:
        values = (Value * max(1, len(inputs)))()
        kept = [_fill(value, given) for value, given in zip(values, inputs, strict=False)]
        results: list[Any] = []
        visit = _VISIT_VALUE(_collector(results, _copied))
        status = self._library.penstock_executorch_execute(self._handle, method.encode(), values, len(inputs), visit)
        del kept
        self._check(f"running method {method!r}", status, is_call=True)
        return _raised(results)

    def state_names(self, method: str) -> list[str]:
        names: list[str] = []
        visit = _VISIT_TEXT(lambda name: names.append(name.decode()))
        status = self._library.penstock_executorch_states(self._handle, method.encode(), visit)
        self._check(f"listing the state of {method!r}", status)
        return names

    def state(self, method: str, name: str) -> torch.Tensor:
        """The memory itself, valid as long as the method is loaded."""
        views: list[Any] = []
        visit = _VISIT_VALUE(_collector(views, _viewed))
        self._check(
            f"finding state {name!r}",
            self._library.penstock_executorch_state(self._handle, method.encode(), name.encode(), visit),
        )
        (view,) = _raised(views)
        assert isinstance(view, torch.Tensor)
        return view

    def payloads(self) -> list[Payload]:
        """Checked against their seals. No method needs to be loaded."""
        found: list[tuple[bytes, bytes]] = []

        def take(record: int, record_bytes: int, code: int, code_bytes: int) -> None:
            found.append((ctypes.string_at(record, record_bytes), ctypes.string_at(code, code_bytes)))

        self._check(
            "reading the program", self._library.penstock_executorch_payloads(self._handle, _VISIT_PAYLOAD(take))
        )
        return [Payload(checked_description(record), code) for record, code in found]

    def share_session(self, session: int, device_index: int, delegates: Sequence[int]) -> None:
        """For methods loaded from now on: delegates, by number, run in this session of the core. It outlives them."""
        numbers = (_i64 * len(delegates))(*delegates)
        status = self._library.penstock_executorch_share_session(
            self._group, session, device_index, numbers, len(delegates)
        )
        self._check("sharing a session", status)

    def share_states(self, device: torch.device, states: Sequence[torch.Tensor]) -> None:
        """For methods loaded from now on: the program's states, in its order, in memory that outlives them."""
        values = (Value * max(1, len(states)))()
        kept = [_fill(value, tensor) for value, tensor in zip(values, states, strict=False)]
        status = self._library.penstock_executorch_share_states(
            self._group, device.type.encode(), device.index or 0, values, len(states)
        )
        del kept
        self._check("sharing state", status)

    def session(self) -> tuple[int, SessionFacts] | None:
        """The session that the delegates made for themselves; None if there is none."""
        numbers = (_i64 * 8)()
        handle = self._library.penstock_executorch_session(self._group, numbers)
        if not handle:
            return None
        floor, full, budget, asked, source, plan, count, held = numbers
        return handle, SessionFacts(floor, full, budget, asked, SOURCES[source], plan, count, held)

    def close(self) -> None:
        if self._handle is not None:
            self._library.penstock_executorch_close(self._handle)
            self._library.penstock_executorch_reclaim(self._group)
            self._handle = None

    def forget(self) -> None:
        """After a fork: it belongs to the parent."""
        self._handle = None

    def _check(self, doing: str, status: int, *, is_call: bool = False) -> None:
        if status:
            raise failure(
                doing,
                status,
                self._library.penstock_executorch_kind(),
                self._library.penstock_executorch_detail(),
                self._library.penstock_executorch_text().decode(errors="replace"),
                is_call=is_call,
            )


def _fill(value: Value, given: Any) -> Any:
    """Fills in one input. What it returns must live as long as the call."""
    if given is None:
        value.kind = _NONE
    elif isinstance(given, torch.Tensor):
        sizes = (_i64 * max(1, given.dim()))(*given.shape)
        strides = (_i64 * max(1, given.dim()))(*given.stride())
        if given.dtype not in _scalar_numbers():
            raise InputError(f"an input has dtype {given.dtype}, which ExecuTorch does not have")
        value.kind, value.scalar_type, value.rank = _TENSOR, _scalar_numbers()[given.dtype], given.dim()
        value.sizes, value.strides, value.data = sizes, strides, given.data_ptr()
        return given, sizes, strides
    elif isinstance(given, bool):
        value.kind, value.integer = _BOOL, int(given)
    elif isinstance(given, int):
        value.kind, value.integer = _INT, given
    elif isinstance(given, float):
        value.kind, value.number = _FLOAT, given
    else:
        raise InputError(f"an input is {given!r:.80}, which ExecuTorch does not take")
    return None


def _collector(results: list[Any], made: Callable[[Value], Any]) -> Callable[[Any], None]:
    def take(shown: Any) -> None:
        try:
            results.append(made(shown.contents))
        except Exception as error:  # it cannot pass through C; it is raised after the call
            results.append(error)

    return take


def _raised(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _viewed(value: Value) -> torch.Tensor:
    """A tensor over ExecuTorch's memory."""
    dtype = _scalar_types().get(value.scalar_type)
    if dtype is None:
        raise PackageError(f"a tensor has scalar type {value.scalar_type}, which torch does not have")
    sizes, strides = value.sizes[: value.rank], value.strides[: value.rank]
    if 0 in sizes:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    items = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (items * dtype.itemsize)).from_address(value.data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def _copied(value: Value) -> Any:
    if value.kind == _TENSOR:
        return _viewed(value).clone()
    if value.kind == _INT:
        return value.integer
    if value.kind == _FLOAT:
        return value.number
    if value.kind == _BOOL:
        return bool(value.integer)
    if value.kind == _STRING:
        try:
            return ctypes.string_at(value.data, value.integer).decode()
        except UnicodeDecodeError as error:
            raise PackageError(f"a method of the program returned text that is damaged: {error}") from error
    return None
