"""The soft driver through its C interface, without torch: the tests of the core need nothing else."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from tests.native.driver import DriverFailure, Failure, Functions, WrappedDriver, bound, check, declare, wrap
from tests.native.driver import library as test_functions
from tests.native.library import core_path, testing

__all__ = ["Counts", "DriverFailure", "Failure", "SoftDriver"]

INLINE = None  # the stream that is the calling thread
Kernel = ctypes.CFUNCTYPE(None, c_void_p)


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


# Beyond the table of all drivers.
SOFT: Functions = {
    "launch": ([c_void_p, Kernel, c_void_p], None),
    "launch_hash": ([c_void_p, c_uint64, c_size_t, POINTER(c_uint64), c_uint64], None),
    "launch_sleep": ([c_void_p, c_uint64], None),
    "set_late": ([c_void_p, c_int32], None),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The core; what tests ask of a soft driver is declared besides."""
    core = ctypes.CDLL(str(core_path()))
    core.penstock_driver_destroy.argtypes = [c_void_p]
    core.penstock_driver_destroy.restype = None
    declare("penstock_soft", SOFT)
    plain: dict[str, tuple[Any, list[Any]]] = {
        "create_capturing": (c_void_p, [c_size_t, c_size_t, c_int32]),
        "counts": (None, [c_void_p, POINTER(Counts)]),
        "set_delays": (None, [c_void_p, c_uint64, c_uint64]),
        "rest": (None, [c_void_p]),
        "set_clock": (None, [c_void_p, c_int64, c_int64]),
        "launch_graph": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32, c_uint64]),
        "set_order": (None, [c_void_p, c_int32, c_uint64]),
    }
    for name, (result, arguments) in plain.items():
        function = getattr(testing(), f"penstock_soft_{name}")
        function.restype, function.argtypes = result, arguments
    return core


class SoftHooks(WrappedDriver):
    """What tests ask of a soft driver inside the one that wraps it. Nothing is owned."""

    def __init__(self, handle: int) -> None:
        library()
        super().__init__(handle)
        self._kernels: list[Any] = []  # alive as long as a stream may call them

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return bound("penstock_soft", SOFT, name, self.wrapped) if name in SOFT else super().__getattr__(name)

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
        check(testing().penstock_soft_launch_graph(self.wrapped, graph, stream, order, seed))

    def counts(self) -> Counts:
        counts = Counts()
        testing().penstock_soft_counts(self.wrapped, byref(counts))
        return counts

    def set_delays(self, seed: int, max_ns: int) -> None:
        testing().penstock_soft_set_delays(self.wrapped, seed, max_ns)

    def rest(self) -> None:
        """Waits until every stream that is not late has nothing left to do, or waits for one that is."""
        testing().penstock_soft_rest(self.wrapped)

    def set_clock(self, now_ns: int, tick_ns: int) -> None:
        """From here on the clock moves by one tick for every copy, fill and kernel that has run: by nothing else."""
        testing().penstock_soft_set_clock(self.wrapped, now_ns, tick_ns)

    def set_order(self, order: int, seed: int = 1) -> None:
        """Of launches that a session makes."""
        testing().penstock_soft_set_order(self.wrapped, order, seed)


class SoftDriver(SoftHooks):
    """One of its own."""

    def __init__(self, page_bytes: int = 4096, capacity_bytes: int = 0, poison: bool = False) -> None:
        library()
        made = testing().penstock_soft_create_capturing(page_bytes, capacity_bytes, poison)
        if not made:
            raise DriverFailure(Failure.DRIVER, test_functions().penstock_test_error().decode())
        super().__init__(wrap(made))

    def close(self) -> None:
        if self.handle:
            library().penstock_driver_destroy(self.handle)
        self.handle = None

    def __enter__(self) -> SoftDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.lru_cache(1024)
def hash_of(data: bytes) -> int:
    """What the hashing kernel computes: FNV-1a, over little-endian words of 8 bytes and then over the bytes left."""
    value, whole = 0xCBF29CE484222325, len(data) // 8 * 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    for word in [*words, *data[whole:]]:
        value = (value ^ word) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value
