"""Any driver through a C interface, inside the one that counts calls and makes them fail. Without torch."""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from tests.native.library import testing


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
    BUDGET = 11
    BELOW_FLOOR = 12
    HOST_MEMORY = 13
    BUILD = 14


class DriverFailure(Exception):
    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


# Arguments behind the driver, and the result that comes back through a pointer.
Functions = Mapping[str, tuple[list[Any], Any]]
TABLE: Functions = {
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
    "begin_capture": ([c_void_p], None),
    "end_capture": ([c_void_p], c_void_p),
    "destroy_graph": ([c_void_p], None),
}


@functools.cache
def library() -> ctypes.CDLL:
    found = testing()
    declare("penstock_test", TABLE)
    plain: dict[str, tuple[Any, list[Any]]] = {
        "error": (c_char_p, []),
        "wrap": (c_void_p, [c_void_p]),
        "wrapped": (c_void_p, [c_void_p]),
        "calls": (c_uint64, [c_void_p]),
        "fail_at": (None, [c_void_p, c_uint64, c_int32, c_char_p]),
        "failed_call": (c_char_p, [c_void_p]),
        "set_probed_device": (None, [c_void_p, c_int32]),
        "set_capturing": (None, [c_void_p, c_void_p, c_int32]),
        "memory_info": (c_int32, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
    }
    for name, (result, arguments) in plain.items():
        function = getattr(found, f"penstock_test_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def declare(prefix: str, functions: Functions) -> None:
    for name, (arguments, result) in functions.items():
        function = getattr(testing(), f"{prefix}_{name}")
        function.argtypes = [c_void_p, *arguments, *([POINTER(result)] if result else [])]
        function.restype = c_int32


def check(failure: int) -> None:
    if failure:
        raise DriverFailure(Failure(failure), library().penstock_test_error().decode())


def bound(prefix: str, functions: Functions, name: str, handle: int | None) -> Callable[..., Any]:
    """A function of the table that takes and returns plain values, and raises."""
    function, result_type = getattr(library(), f"{prefix}_{name}"), functions[name][1]

    def call(*arguments: Any) -> Any:
        if result_type is None:
            return check(function(handle, *arguments))
        result = result_type()
        check(function(handle, *arguments, byref(result)))
        return result.value

    return call


def wrap(handle: int) -> int:
    """A driver that owns the given one. It is given to sessions, and destroyed, as any other."""
    return int(library().penstock_test_wrap(handle))


class WrappedDriver:
    """By the handle of a driver that wraps another. Its functions are those of csrc/driver/driver.h, by the same names:
    driver.create_block(bytes). Nothing is owned."""

    def __init__(self, handle: int) -> None:
        self.handle: int | None = handle
        wrapped = library().penstock_test_wrapped(handle)
        assert wrapped, "this driver was opened as users open it: no call of it can be counted or made to fail"
        self.wrapped = int(wrapped)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in TABLE:
            raise AttributeError(f"a driver has no function {name}")
        return bound("penstock_test", TABLE, name, self.handle)

    def memory_info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        check(library().penstock_test_memory_info(self.handle, byref(free), byref(total)))
        return free.value, total.value

    def calls(self) -> int:
        return int(library().penstock_test_calls(self.handle))

    def fail_at(self, n: int, failure: Failure = Failure.NONE, call: str = "") -> None:
        """The n-th call from now, or the n-th of that name; 0 takes it back. By default with its natural failure."""
        library().penstock_test_fail_at(self.handle, n, failure, call.encode())

    def failed_call(self) -> str:
        return str(library().penstock_test_failed_call(self.handle).decode())

    def set_capturing(self, stream: int | None, capturing: bool) -> None:
        """Only what the driver says: nothing is captured."""
        library().penstock_test_set_capturing(self.handle, stream, capturing)

    def set_probed_device(self, device_index: int) -> None:
        """As a GPU of that number: whether a file can be registered with it is tried in a process first."""
        library().penstock_test_set_probed_device(self.handle, device_index)
