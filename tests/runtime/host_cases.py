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
from tests.runtime.soft import Counts, DriverFailure, SoftDriver

LIBRARY = Path(penstock.__file__).parent / "libpenstock.so"
PAGE = os.sysconf("SC_PAGESIZE")

# csrc/driver/driver.h
DRIVER, REGISTRATION, HOST_READ, USAGE = 1, 3, 5, 9


class CoreFailure(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    declare_host_functions(library)
    return library


core = load()


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
        self._driver = SoftDriver(PAGE, 0, poison=True)
        self.driver = ctypes.c_void_p(self._driver.handle)
        self.bytes = -(-device_bytes // PAGE) * PAGE
        self.stream = ctypes.c_void_p(self._driver.create_stream())
        self.address = ctypes.c_uint64(self._driver.reserve(self.bytes))
        self._block = self._driver.create_block(self.bytes)
        self._driver.map(self.address, self.bytes, self._block)
        self._driver.allow_access(self.address, self.bytes)

    def counts(self) -> Counts:
        return self._driver.counts()

    def calls(self) -> int:
        return self._driver.calls()

    def fail_at(self, number: int, call: str = "") -> None:
        self._driver.fail_at(number, call=call)

    def failed_call(self) -> str:
        return self._driver.failed_call()

    def set_delays(self, seed: int, max_ns: int) -> None:
        self._driver.set_delays(seed, max_ns)

    def set_late(self) -> None:
        """From here on what is queued runs when somebody waits for it."""
        self._driver.set_late(self.stream, 1)

    def synchronize(self) -> None:
        try:
            self._driver.synchronize_stream(self.stream)
        except DriverFailure as failed:
            raise CoreFailure(failed.failure, str(failed)) from failed

    def read(self, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.address.value + offset, nbytes)

    def close(self) -> None:
        self._driver.destroy_stream(self.stream)
        self._driver.unmap(self.address, self.bytes)
        self._driver.release_block(self._block)
        self._driver.unreserve(self.address, self.bytes)
        self._driver.close()


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
