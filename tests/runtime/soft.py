"""The soft driver through its C interface, without torch: the tests of the core need nothing else."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

BUILT = Path(__file__).parents[2] / "src" / "penstock" / "libpenstock.so"
INLINE = None  # the stream that is the calling thread
Kernel = ctypes.CFUNCTYPE(None, c_void_p)


class Failure(enum.IntEnum):
    """As in csrc/driver/driver.h."""

    NONE = 0
    DRIVER = 1
    DEVICE_MEMORY = 2
    REGISTRATION = 3
    DIVERGENCE = 4
    HOST_READ = 5
    STICKY = 6
    CAPTURE = 7
    TORCH = 8
    USAGE = 9
    KERNEL = 10


class SoftError(Exception):
    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Counts(ctypes.Structure):
    """What is alive in a driver; as SoftCounts in csrc/soft/soft_driver.h."""

    _fields_ = [
        ("blocks", c_int64),
        ("block_bytes", c_int64),
        ("peak_block_bytes", c_int64),
        ("ranges", c_int64),
        ("mappings", c_int64),
        ("streams", c_int64),
        ("events", c_int64),
        ("pools", c_int64),
        ("pool_allocations", c_int64),
        ("pool_bytes", c_int64),
        ("registrations", c_int64),
        ("registered_bytes", c_int64),
        ("host_allocations", c_int64),
        ("host_bytes", c_int64),
        ("peak_host_bytes", c_int64),
        ("graphs", c_int64),
    ]

    def alive(self) -> dict[str, int]:
        """Everything that is not 0, peaks aside: empty when nothing has leaked."""
        named = {field[0]: int(getattr(self, field[0])) for field in self._fields_}
        return {name: value for name, value in named.items() if value and not name.startswith("peak_")}


# Arguments behind the driver, and the result that comes back through a pointer.
FALLIBLE: dict[str, tuple[list[Any], Any]] = {
    "granularity_bytes": ([], c_size_t),
    "create_block": ([c_size_t], c_uint64),
    "release_block": ([c_uint64], None),
    "reserve": ([c_size_t], c_uint64),
    "unreserve": ([c_uint64, c_size_t], None),
    "map": ([c_uint64, c_size_t, c_uint64], None),
    "allow_access": ([c_uint64, c_size_t], None),
    "unmap": ([c_uint64, c_size_t], None),
    "create_pool": ([c_size_t], c_void_p),
    "destroy_pool": ([c_void_p], None),
    "pool_allocate": ([c_void_p, c_size_t, c_void_p], c_uint64),
    "pool_release": ([c_void_p, c_uint64, c_void_p], None),
    "pool_peak_bytes": ([c_void_p], c_size_t),
    "create_stream": ([], c_void_p),
    "destroy_stream": ([c_void_p], None),
    "synchronize_stream": ([c_void_p], None),
    "is_capturing": ([c_void_p], c_int32),
    "create_event": ([c_int32], c_void_p),
    "destroy_event": ([c_void_p], None),
    "record": ([c_void_p, c_void_p], None),
    "wait": ([c_void_p, c_void_p], None),
    "record_external": ([c_void_p, c_void_p], None),
    "wait_external": ([c_void_p, c_void_p], None),
    "synchronize_event": ([c_void_p], None),
    "is_complete": ([c_void_p], c_int32),
    "elapsed_ns": ([c_void_p, c_void_p], c_int64),
    "copy_to_device": ([c_uint64, c_void_p, c_size_t, c_void_p], None),
    "copy_to_host": ([c_void_p, c_uint64, c_size_t, c_void_p], None),
    "fill": ([c_uint64, c_int32, c_size_t, c_void_p], None),
    "register_host": ([c_void_p, c_size_t], None),
    "unregister_host": ([c_void_p], None),
    "host_address": ([c_void_p, c_size_t], c_uint64),
    "allocate_host": ([c_size_t], c_void_p),
    "free_host": ([c_void_p], None),
    "launch": ([c_void_p, Kernel, c_void_p], None),
    "launch_hash": ([c_void_p, c_uint64, c_size_t, POINTER(c_uint64), c_uint64], None),
    "launch_sleep": ([c_void_p, c_uint64], None),
    "begin_capture": ([c_void_p], None),
    "end_capture": ([c_void_p], c_void_p),
    "destroy_graph": ([c_void_p], None),
    "set_late": ([c_void_p, c_int32], None),
}


@functools.cache
def library() -> ctypes.CDLL:
    core = ctypes.CDLL(os.environ.get("PENSTOCK_CORE_LIBRARY", str(BUILT)))
    core.penstock_soft_error.restype = c_char_p
    core.penstock_soft_create.argtypes = [c_size_t, c_size_t, c_int32]
    core.penstock_soft_create.restype = c_void_p
    core.penstock_soft_destroy.argtypes = [c_void_p]
    core.penstock_soft_destroy.restype = None
    core.penstock_soft_counts.argtypes = [c_void_p, POINTER(Counts)]
    core.penstock_soft_counts.restype = None
    core.penstock_soft_calls.argtypes = [c_void_p]
    core.penstock_soft_calls.restype = c_uint64
    core.penstock_soft_fail_at.argtypes = [c_void_p, c_uint64, c_int32, c_char_p]
    core.penstock_soft_fail_at.restype = None
    core.penstock_soft_failed_call.argtypes = [c_void_p]
    core.penstock_soft_failed_call.restype = c_char_p
    core.penstock_soft_set_delays.argtypes = [c_void_p, c_uint64, c_uint64]
    core.penstock_soft_set_delays.restype = None
    core.penstock_soft_rest.argtypes = [c_void_p]
    core.penstock_soft_rest.restype = None
    core.penstock_soft_set_clock.argtypes = [c_void_p, c_int64, c_int64]
    core.penstock_soft_set_clock.restype = None
    core.penstock_soft_set_capturing.argtypes = [c_void_p, c_void_p, c_int32]
    core.penstock_soft_set_capturing.restype = None
    core.penstock_soft_memory_info.argtypes = [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]
    core.penstock_soft_memory_info.restype = c_int32
    core.penstock_soft_launch_graph.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_uint64]
    core.penstock_soft_launch_graph.restype = c_int32
    core.penstock_soft_set_order.argtypes = [c_void_p, c_int32, c_uint64]
    core.penstock_soft_set_order.restype = None
    for name, (arguments, result) in FALLIBLE.items():
        function = getattr(core, f"penstock_soft_{name}")
        function.argtypes = [c_void_p, *arguments, *([POINTER(result)] if result else [])]
        function.restype = c_int32
    return core


def _raise(failure: int) -> None:
    raise SoftError(Failure(failure), library().penstock_soft_error().decode())


class SoftDriver:
    """One driver. Its functions are those of csrc/driver/driver.h, by the same names: driver.create_block(bytes)."""

    def __init__(self, page_bytes: int = 4096, capacity_bytes: int = 0, poison: bool = False) -> None:
        self.handle = library().penstock_soft_create(page_bytes, capacity_bytes, poison)
        if not self.handle:
            _raise(Failure.DRIVER)
        self._kernels: list[Any] = []  # alive as long as a stream may call them

    def close(self) -> None:
        if self.handle:
            library().penstock_soft_destroy(self.handle)
        self.handle = None

    def __enter__(self) -> SoftDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in FALLIBLE:
            raise AttributeError(f"the soft driver has no function {name}")
        function = getattr(library(), f"penstock_soft_{name}")
        result_type = FALLIBLE[name][1]

        def call(*arguments: Any) -> Any:
            if result_type is None:
                if failure := function(self.handle, *arguments):
                    _raise(failure)
                return None
            result = result_type()
            if failure := function(self.handle, *arguments, byref(result)):
                _raise(failure)
            return result.value

        return call

    def memory_info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        if failure := library().penstock_soft_memory_info(self.handle, byref(free), byref(total)):
            _raise(failure)
        return free.value, total.value

    def call(self, stream: int | None, body: Callable[[], None]) -> None:
        """Run a Python function as a kernel."""
        kernel = Kernel(lambda _: body())
        self._kernels.append(kernel)
        self.launch(stream, kernel, None)

    def hash(self, stream: int | None, address: int, nbytes: int, delay_ns: int = 0) -> ctypes.c_uint64:
        """Launch the kernel that hashes; read .value once the stream has been waited for."""
        out = c_uint64()
        self.launch_hash(stream, address, nbytes, byref(out), delay_ns)
        return out

    def launch_graph(self, graph: int, stream: int | None, order: int = 0, seed: int = 1) -> None:
        """Copies first (0), kernels first (1), at random (2), on several threads (3), as the captured edges allow."""
        if failure := library().penstock_soft_launch_graph(self.handle, graph, stream, order, seed):
            _raise(failure)

    def counts(self) -> Counts:
        counts = Counts()
        library().penstock_soft_counts(self.handle, byref(counts))
        return counts

    def calls(self) -> int:
        return int(library().penstock_soft_calls(self.handle))

    def fail_at(self, n: int, failure: Failure = Failure.NONE, call: str = "") -> None:
        library().penstock_soft_fail_at(self.handle, n, failure, call.encode())

    def failed_call(self) -> str:
        return str(library().penstock_soft_failed_call(self.handle).decode())

    def set_delays(self, seed: int, max_ns: int) -> None:
        library().penstock_soft_set_delays(self.handle, seed, max_ns)

    def rest(self) -> None:
        """Waits until every stream that is not late has nothing left to do, or waits for one that is."""
        library().penstock_soft_rest(self.handle)

    def set_clock(self, now_ns: int, tick_ns: int) -> None:
        """From here on the clock moves by one tick for every copy, fill and kernel that has run: by nothing else."""
        library().penstock_soft_set_clock(self.handle, now_ns, tick_ns)

    def set_order(self, order: int, seed: int = 1) -> None:
        """Of launches that a session makes."""
        library().penstock_soft_set_order(self.handle, order, seed)

    def set_capturing(self, stream: int | None, capturing: bool) -> None:
        library().penstock_soft_set_capturing(self.handle, stream, capturing)


@functools.lru_cache(1024)
def hash_of(data: bytes) -> int:
    """What the hashing kernel computes: FNV-1a, over little-endian words of 8 bytes and then over the bytes left."""
    value, whole = 0xCBF29CE484222325, len(data) // 8 * 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    for word in [*words, *data[whole:]]:
        value = (value ^ word) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value
