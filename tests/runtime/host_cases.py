"""The native host functions for tests: loaded without torch, so that a child process starts quickly."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import penstock
from penstock.runtime.host_memory import declare_host_functions

LIBRARY = Path(penstock.__file__).parent / "libpenstock.so"
PAGE = os.sysconf("SC_PAGESIZE")

# csrc/driver/driver.h
DRIVER, REGISTRATION, HOST_READ, USAGE = 1, 3, 5, 9


class Counts(ctypes.Structure):
    """SoftCounts in csrc/soft/soft_driver.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("blocks", "block_bytes", "peak_block_bytes", "ranges", "mappings", "streams", "events"),
            *("pools", "pool_allocations", "pool_bytes", "registrations", "registered_bytes"),
            *("host_allocations", "host_bytes", "peak_host_bytes", "graphs"),
        )
    ]


class CoreFailure(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    declare_host_functions(library)
    return library


core = load()
core.penstock_soft_create.restype = ctypes.c_void_p
core.penstock_soft_error.restype = ctypes.c_char_p
core.penstock_soft_calls.restype = ctypes.c_uint64
core.penstock_soft_failed_call.restype = ctypes.c_char_p


def host(name: str, *arguments: object) -> None:
    """A penstock_host_ function that can fail."""
    code = getattr(core, f"penstock_host_{name}")(*arguments)
    if code:
        raise CoreFailure(code, core.penstock_host_error().decode())


@contextmanager
def host_file(path: Path) -> Iterator[ctypes.c_void_p]:
    file = ctypes.c_void_p()
    host("file_open", os.fsencode(path), ctypes.byref(file))
    try:
        yield file
    finally:
        core.penstock_host_file_close(file)


class SoftDevice:
    """A soft driver, a stream and some device memory."""

    def __init__(self, device_bytes: int) -> None:
        self.driver = ctypes.c_void_p(core.penstock_soft_create(ctypes.c_size_t(PAGE), ctypes.c_size_t(0), 1))
        self.bytes = -(-device_bytes // PAGE) * PAGE
        self.stream = ctypes.c_void_p()
        self.address = ctypes.c_uint64()
        self._block = ctypes.c_uint64()
        self.soft("create_stream", ctypes.byref(self.stream))
        self.soft("reserve", ctypes.c_size_t(self.bytes), ctypes.byref(self.address))
        self.soft("create_block", ctypes.c_size_t(self.bytes), ctypes.byref(self._block))
        self.soft("map", self.address, ctypes.c_size_t(self.bytes), self._block)
        self.soft("allow_access", self.address, ctypes.c_size_t(self.bytes))

    def soft(self, name: str, *arguments: object) -> None:
        code = getattr(core, f"penstock_soft_{name}")(self.driver, *arguments)
        if code:
            raise CoreFailure(code, core.penstock_soft_error().decode())

    def counts(self) -> Counts:
        counts = Counts()
        core.penstock_soft_counts(self.driver, ctypes.byref(counts))
        return counts

    def calls(self) -> int:
        return int(core.penstock_soft_calls(self.driver))

    def fail_at(self, number: int, call: str | None = None) -> None:
        core.penstock_soft_fail_at(self.driver, ctypes.c_uint64(number), 0, call.encode() if call else None)

    def failed_call(self) -> str:
        return str(core.penstock_soft_failed_call(self.driver).decode())

    def set_delays(self, seed: int, max_ns: int) -> None:
        core.penstock_soft_set_delays(self.driver, ctypes.c_uint64(seed), ctypes.c_uint64(max_ns))

    def set_late(self) -> None:
        """From here on what is queued runs when somebody waits for it."""
        self.soft("set_late", self.stream, 1)

    def synchronize(self) -> None:
        self.soft("synchronize_stream", self.stream)

    def read(self, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.address.value + offset, nbytes)

    def close(self) -> None:
        self.soft("destroy_stream", self.stream)
        self.soft("unmap", self.address, ctypes.c_size_t(self.bytes))
        self.soft("release_block", self._block)
        self.soft("unreserve", self.address, ctypes.c_size_t(self.bytes))
        core.penstock_soft_destroy(self.driver)


@contextmanager
def soft_device(device_bytes: int) -> Iterator[SoftDevice]:
    device = SoftDevice(device_bytes)
    try:
        yield device
    finally:
        device.close()


def run_child(code: str, *arguments: object, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own: what kills it shows as a failed test and not as a dead pytest."""
    root = Path(__file__).parents[2]
    places = [str(root), str(Path(penstock.__file__).parents[1])]
    return subprocess.run(
        [sys.executable, *options, "-c", "from tests.runtime.host_cases import *\n" + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )
