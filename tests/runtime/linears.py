"""Programs of linears without a compiler: weights, plans that split them, and the calls that compiled code makes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.native import core
from penstock.plan.plan import DIRECT, Block, Copy, MethodPlan, Piece, Placement, Plan, Range, Stay
from penstock.runtime.failures import last_exception
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight
from tests.runtime.session_harness import PAGE, Model, SessionHarness

WHOLE = -1  # a prefix of all rows
STREAMED = -2


def write_linears(path: Path, weights: dict[str, Tensor], uses: Sequence[str]) -> Model:
    """One method; one step and one access for each use. Weights begin on pages."""
    offsets: dict[str, int] = {}
    data = bytearray()
    for name, weight in weights.items():
        data += bytes(-len(data) % PAGE)
        offsets[name] = len(data)
        data += weight.contiguous().view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    accesses = tuple(Access(10 + at, name, linear=True) for at, name in enumerate(uses))
    steps = tuple(Step(f"k{at}", (access.number,)) for at, access in enumerate(accesses))
    described = {
        name: Weight(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), (0, 1))
        for name, weight in weights.items()
    }
    return Model((Schedule("forward", accesses, steps),), described, offsets, path)


def split_plan(model: Model, prefix_rows: dict[str, int]) -> Plan:
    """Prefixes in ranges of their own; what streams is copied before its use and again, after it, for the next run."""
    blocks: list[Block] = []
    ranges: list[Range] = []
    fills: list[Piece] = []
    copies: list[Copy] = []
    stays: list[Stay] = []
    placed: dict[str, tuple[int, int | None]] = {}
    (schedule,) = model.schedules
    positions = {access.weight: at for at, access in enumerate(schedule.accesses)}
    for name, weight in model.weights.items():
        rows, row_bytes = weight.shape[0], weight.nbytes // weight.shape[0]
        streamed = prefix_rows[name] == STREAMED
        prefix_bytes = weight.nbytes if prefix_rows[name] in (WHOLE, STREAMED, rows) else prefix_rows[name] * row_bytes
        if not prefix_bytes:
            placed[name] = (DIRECT, None)
            continue
        pages = -(-prefix_bytes // PAGE)
        ranges.append(Range(pages * PAGE, tuple(range(len(blocks), len(blocks) + pages))))
        blocks += [Block(PAGE, streamed)] * pages
        piece = Piece(name, 0, prefix_bytes, len(ranges) - 1, 0)
        if streamed:
            at = positions[name]
            copies.append(Copy(len(stays), piece, at, at))
            stays.append(Stay(name, prefix_bytes, (at,), at))
        else:
            fills.append(piece)
        placed[name] = (len(ranges) - 1, prefix_bytes if prefix_bytes < weight.nbytes else None)
    placements = [
        Placement(access.number, access.weight, model.weights[access.weight].nbytes, where, 0, None, prefix_bytes)
        for access in schedule.accesses
        for where, prefix_bytes in [placed[access.weight]]
    ]
    for stay, record in enumerate(stays):
        old = placements[record.accesses[0]]
        placements[record.accesses[0]] = Placement(
            old.number, old.weight, old.nbytes, old.range_index, 0, stay, old.prefix_bytes
        )
    method = MethodPlan("forward", tuple(placements), tuple(stays), tuple(copies), len(schedule.steps))
    return Plan(PAGE, tuple(blocks), tuple(ranges), tuple(fills), (method,))


# ---- the C ABI of AOTInductor, as compiled code uses it


@cache
def torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@cache
def core_library() -> ctypes.CDLL:
    """The core with torch found, and the functions that only compiled code calls."""
    library = core()
    if library.penstock_load_torch():
        raise last_exception()
    fetch, linear = library.aoti_torch_cpu_penstock_weight, library.aoti_torch_cpu_penstock_linear
    fetch.argtypes = [c_int64, POINTER(c_int64), c_int64, c_int32, c_int32, c_int32, POINTER(c_void_p)]
    linear.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, POINTER(c_void_p)]
    return library


def dtype_code(dtype: torch.dtype) -> int:
    return int(getattr(torch_library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")())


class Handle:
    """A handle to the tensor's own memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        rank = tensor.dim()
        sizes, strides = (c_int64 * rank)(*tensor.shape), (c_int64 * rank)(*tensor.stride())
        self.pointer = c_void_p()
        where = c_void_p(tensor.data_ptr()), c_int64(rank), sizes, strides, c_int64(0)
        kind = c_int32(dtype_code(tensor.dtype)), c_int32(0), c_int32(-1)
        assert not torch_library().aoti_torch_create_tensor_from_blob(*where, *kind, byref(self.pointer))

    def __del__(self) -> None:
        torch_library().aoti_torch_delete_tensor_object(self.pointer)


def fetched(number: int, shape: Sequence[int], dtype: torch.dtype) -> c_void_p:
    out = c_void_p()
    sizes = (c_int64 * len(shape))(*shape)
    if core_library().aoti_torch_cpu_penstock_weight(number, sizes, len(shape), dtype_code(dtype), 0, -1, byref(out)):
        raise RuntimeError("the fetch failed")
    return out


def multiplied(x: Tensor, weight: c_void_p, bias: Tensor | None, number: int) -> Tensor:
    """What the shim gives back, copied."""
    out = c_void_p()
    left, added = Handle(x), None if bias is None else Handle(bias)
    if core_library().aoti_torch_cpu_penstock_linear(
        left.pointer, weight, None if added is None else byref(added.pointer), number, byref(out)
    ):
        raise RuntimeError("the linear failed")
    try:
        return _copied(out, x.dtype)
    finally:
        torch_library().aoti_torch_delete_tensor_object(out)


def _copied(handle: c_void_p, dtype: torch.dtype) -> Tensor:
    library = torch_library()
    sizes, strides, data = POINTER(c_int64)(), POINTER(c_int64)(), c_void_p()
    for call, out in (("sizes", sizes), ("strides", strides), ("data_ptr", data)):
        assert not getattr(library, f"aoti_torch_get_{call}")(handle, byref(out))
    shape = (sizes[0], sizes[1])
    assert (strides[0], strides[1]) == (shape[1], 1)
    numbers = shape[0] * shape[1]
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    memory = ctypes.string_at(data.value or 0, numbers * dtype.itemsize)
    return torch.frombuffer(bytearray(memory), dtype=dtype).view(shape)


@dataclass(frozen=True)
class Call:
    x: Tensor
    bias: Tensor | None = None


def products(harness: SessionHarness, calls: Sequence[Call], stream: int = 0) -> list[Tensor]:
    """One run: every access is fetched, multiplied with, and its step ended."""
    (schedule,) = harness.model.schedules
    results: list[Any] = []
    harness.begin(0, stream)
    for step, (access, call) in enumerate(zip(schedule.accesses, calls, strict=True)):
        weight = harness.model.weights[access.weight]
        lent = fetched(access.number, weight.shape, getattr(torch, weight.dtype))
        try:
            results.append(multiplied(call.x, lent, call.bias, access.number))
        finally:
            torch_library().aoti_torch_delete_tensor_object(lent)
        harness.done(step)
    harness.end()
    return results
