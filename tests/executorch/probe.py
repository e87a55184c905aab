"""The delegate called as ExecuTorch calls it, with whatever a play likes: tests/executorch/delegate_probe.cpp."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.executorch.description import DelegateRef, PlanTable
from penstock.executorch.native import Value, _fill
from penstock.executorch.native import library as delegate_library
from penstock.executorch.payload import (
    DELEGATE_REF_MAGIC,
    HEADER_BYTES,
    PAYLOAD_MAGIC,
    StoredPlan,
    pack_delegate_ref,
    pack_payload,
    payload_bytes,
    read_payload,
)
from penstock.record import from_record
from penstock.weights import read_index
from penstock.weights.format import SCALAR_TYPES
from tests.native.driver import Failure, WrappedDriver
from tests.native.driver import library as driver_library

Option = int | bool | str
# What an output holds before a run: no result is this.
UNTOUCHED = 77


class Made(ctypes.Structure):
    """What the delegate asked of the core; as in delegate_probe.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("drivers", "sessions", "page_bytes", "driver_poison", "session_poison")),
        *((name, c_int64) for name in ("host_cap_bytes", "extra_host_bytes", "device_index", "extent_count")),
        ("extents", c_int64 * 32),
        ("driver", c_void_p),
        ("session", c_void_p),
    ]


class _Option(ctypes.Structure):
    _fields_ = [("key", c_char_p), ("kind", c_int32), ("number", c_int32), ("text", c_char_p)]


@functools.cache
def library() -> ctypes.CDLL:
    loaded = delegate_library()
    values = [c_void_p, POINTER(Value), c_int64]
    functions: dict[str, tuple[Any, list[Any]]] = {
        "probe_data": (c_void_p, [c_char_p]),
        "probe_data_close": (None, [c_void_p]),
        "probe_data_held": (c_int64, [c_void_p]),
        "probe_data_add": (
            None,
            [c_void_p, c_char_p, c_int32, c_int64, POINTER(c_int64), POINTER(c_int64), c_int64, c_int64],
        ),
        "probe_data_add_bytes": (None, [c_void_p, c_char_p, c_char_p, c_int64]),
        "probe_init": (
            c_int32,
            [c_void_p, c_char_p, c_int64, POINTER(_Option), c_int64, POINTER(c_void_p), POINTER(c_int32)],
        ),
        "probe_execute": (c_int32, values),
        "probe_destroy": (None, [c_void_p]),
        "probe_made": (None, [POINTER(Made)]),
        "probe_refuse": (None, [c_char_p]),
        "probe_wrap_drivers": (None, [c_void_p]),
        "probe_count_tensors": (None, []),
        "probe_tensors_alive": (c_int64, []),
        "probe_tensors_made": (c_int64, []),
        "penstock_executorch_link": (c_int32, [c_char_p, c_char_p, _VISIT, c_void_p]),
        "penstock_executorch_start_trace": (c_int32, [c_char_p, c_char_p]),
        "penstock_executorch_stop_trace": (c_int32, [c_char_p, c_char_p, _VISIT, c_void_p]),
        "probe_two_at_once": (c_int32, [*values, *values]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    wrap_drivers_by(loaded, "wrap")
    return loaded


def wrap_drivers_by(loaded: ctypes.CDLL, function: str) -> None:
    loaded.probe_wrap_drivers(ctypes.cast(getattr(driver_library(), f"penstock_test_{function}"), c_void_p))


@contextlib.contextmanager
def drivers_wrapped_by(function: str) -> Iterator[None]:
    """Of tests/native/driver_api.cpp."""
    wrap_drivers_by(library(), function)
    try:
        yield
    finally:
        wrap_drivers_by(library(), "wrap")


# What C++ is shown of a record: its numbers.
_VISIT = ctypes.CFUNCTYPE(None, POINTER(c_int64), c_void_p)


class Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status, self.kind = status, library().penstock_executorch_kind()
        self.detail, self.text = library().penstock_executorch_detail(), library().penstock_executorch_text().decode()
        super().__init__(f"error {self.status:#x}, kind {self.kind}, {self.detail}: {self.text}")


def made() -> Made:
    found = Made()
    library().probe_made(ctypes.byref(found))
    return found


def records(function: str, numbers: int, group: str, delegate: str = "") -> list[list[int]]:
    """What a function of penstock_executorch.h shows, so many numbers each; raises Refused."""
    found: list[list[int]] = []
    visit = _VISIT(lambda record, _: found.append(record[:numbers]))
    status = getattr(library(), f"penstock_executorch_{function}")(group.encode(), delegate.encode(), visit, None)
    if status:
        raise Refused(status)
    return found


def start_trace(group: str, delegate: str = "") -> None:
    status = library().penstock_executorch_start_trace(group.encode(), delegate.encode())
    if status:
        raise Refused(status)


def fail_later(call: str, failure: int, number: int) -> None:
    """The number-th from now, of the driver that was made last; 0 takes it back."""
    WrappedDriver(made().driver).fail_at(number, Failure(failure), call)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What is written to the log, as one text, once the block has ended."""
    text: list[str] = []
    before, log = os.dup(2), os.memfd_create("log")
    os.dup2(log, 2)
    try:
        yield text
    finally:
        os.dup2(before, 2)
        text.append(os.pread(log, 1 << 20, 0).decode(errors="replace"))
        os.close(before)
        os.close(log)


@dataclass(frozen=True)
class Place:
    """Where a weight lies in a file."""

    name: str
    scalar_type: int
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    offset_bytes: int
    nbytes: int


class Program:
    """What a .pte and its .ptd hold for the delegate, to be given to it changed or as it is."""

    def __init__(self, path: Path) -> None:
        self.path, self.data_path = path, path.with_suffix(".ptd")
        raw = path.read_bytes()
        start = raw.index(PAYLOAD_MAGIC)
        payload = read_payload(raw[start : start + payload_bytes(raw[start : start + HEADER_BYTES])])
        self.description = payload.description
        self.code = payload.code
        self.plans: list[StoredPlan] = []
        left = payload.plans
        for row in (row for table in self.description.plan_tables for row in table.plans):
            self.plans.append(StoredPlan(row.device_bytes, left[: 8 * row.numbers], bool(row.copies)))
            left = left[8 * row.numbers :]
        self.delegate_refs: dict[str, DelegateRef] = {}
        at = raw.find(DELEGATE_REF_MAGIC)
        while at >= 0:
            record = raw[at + HEADER_BYTES : at + payload_bytes(raw[at : at + HEADER_BYTES])]
            ref = from_record(DelegateRef, record)
            self.delegate_refs[ref.method] = ref
            at = raw.find(DELEGATE_REF_MAGIC, at + 1)
        self.places = [
            Place(e.name, SCALAR_TYPES[e.dtype], tuple(e.shape), tuple(e.dim_order), e.offset_bytes, e.length_bytes)
            for e in read_index(self.data_path)
        ]
        self._payloads: dict[tuple[str, bool], bytes] = {}

    def payload(self, changes: Mapping[str, Any], with_code: bool = True) -> bytes:
        """Kept, for the hash over the code takes its time. A load that is refused before that needs none."""
        key = (repr(changes), with_code)
        if key not in self._payloads:
            code = self.code if with_code else b""
            self._payloads[key] = pack_payload(replace(self.description, **changes), self.plans, code)
        return self._payloads[key]

    @property
    def whole(self) -> PlanTable:
        """The plans of all delegates together."""
        return self.description.plan_tables[0]


class Data:
    """A program's named data: its payload, and its weights in a file that is mapped."""

    def __init__(self, program: Program, payload: bytes, path: Path, places: Sequence[Place]) -> None:
        self.handle = library().probe_data(str(path).encode())
        for place in places:
            rank = len(place.shape)
            shape, order = (c_int64 * rank)(*place.shape), (c_int64 * rank)(*place.dim_order)
            name = place.name.encode()
            library().probe_data_add(
                self.handle, name, place.scalar_type, rank, shape, order, place.offset_bytes, place.nbytes
            )
        (key,) = {ref.payload for ref in program.delegate_refs.values()}
        library().probe_data_add_bytes(self.handle, key.encode(), payload, len(payload))

    def close(self) -> None:
        assert library().probe_data_held(self.handle) == 0
        library().probe_data_close(self.handle)


class Delegate:
    """One that is loaded; raises Refused. `changes` are made to the description, `delegate_ref` to the delegate_ref."""

    def __init__(
        self,
        program: Program,
        method: str,
        options: Mapping[str, Option] | None = None,
        *,
        changes: Mapping[str, Any] | None = None,
        delegate_ref: Mapping[str, Any] | None = None,
        file: tuple[Path, Sequence[Place]] | None = None,
        with_data: bool = True,
        with_code: bool = True,
        payload: bytes | None = None,
    ) -> None:
        self.program, self.method = program, method
        self.group = str((options or {}).get("weight_offload_group", "")).encode()
        path, places = file or (program.data_path, program.places)
        given_payload = payload or program.payload(changes or {}, with_code)
        data = Data(program, given_payload, path, places) if with_data else None
        packed = pack_delegate_ref(replace(program.delegate_refs[method], **(delegate_ref or {})))
        given = (_Option * max(1, len(options or {})))()
        for option, (key, value) in zip(given, (options or {}).items(), strict=False):
            option.key = key.encode()
            option.kind = 2 if isinstance(value, str) else int(isinstance(value, bool))
            option.text = value.encode() if isinstance(value, str) else None
            option.number = 0 if isinstance(value, str) else int(value)
        out, freed = c_void_p(), c_int32()
        handle = data.handle if data else None
        status = library().probe_init(
            handle, packed, len(packed), given, len(options or {}), ctypes.byref(out), ctypes.byref(freed)
        )
        if data:
            data.close()  # what the delegate needs it has
        self.handle = out.value
        if status:
            assert self.handle is None
            raise Refused(status)
        assert freed.value, "the delegate_ref was not given back"

    def values(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        given = [*inputs, *outputs]
        values = (Value * len(given))()
        return values, [_fill(value, one) for value, one in zip(values, given, strict=True)]

    def execute(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Tensor]:
        values, kept = self.values(inputs, outputs)
        status = library().probe_execute(self.handle, values, len(values))
        del kept
        if status:
            raise Refused(status)
        return [resized(values[len(inputs) + at], output) for at, output in enumerate(outputs)]

    def read_state(self, name: str, like: Tensor) -> Tensor:
        found = torch.full_like(like, float(UNTOUCHED))
        self._check(library().penstock_executorch_read_state(self.group, name.encode(), found.data_ptr(), found.nbytes))
        return found

    def write_state(self, name: str, value: Tensor) -> None:
        self._check(
            library().penstock_executorch_write_state(self.group, name.encode(), value.data_ptr(), value.nbytes)
        )

    def reset_state(self) -> None:
        self._check(library().penstock_executorch_reset_state(self.group))

    def _check(self, status: int) -> None:
        if status:
            raise Refused(status)

    def close(self) -> None:
        library().probe_destroy(self.handle)
        self.handle = None


def resized(value: Value, output: Tensor) -> Tensor:
    sizes = value.sizes[: value.rank]
    return output.flatten()[: torch.Size(sizes).numel()].view(sizes)
