"""The host side of the core by itself: loaded without torch, so that a child process starts quickly."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.native.library import testing
from tests.runtime.soft import Counts, DriverFailure, SoftDriver

PAGE = os.sysconf("SC_PAGESIZE")

# csrc/driver/driver.h
DRIVER, REGISTRATION, HOST_READ, USAGE = 1, 3, 5, 9


class CoreFailure(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


_P, _I32, _I64, _PTR = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.POINTER
FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "file_open": (_I32, [ctypes.c_char_p, _PTR(_P)]),
    "file_close": (None, [_P]),
    "file_data": (_P, [_P]),
    "file_bytes": (_I64, [_P]),
    "file_check": (_I32, [_P]),
    "file_prefault": (_I32, [_P, _I64, _I64, _I32, _PTR(_I64)]),
    "guarded_copy": (_I32, [_P, _P, ctypes.c_size_t]),
    "guarded_touch": (_I32, [_P, ctypes.c_size_t]),
    "register": (_I32, [_P, _P, _PTR(_I64), _I64, _PTR(_P)]),
    "unregister": (None, [_P]),
    "staging_create": (_I32, [_P, _P, _I64, _I32, _I32, _PTR(_P)]),
    "staging_destroy": (None, [_P]),
    "staging_follow": (_I32, [_P, _P, _I64, _P, _I64]),
    "staging_copy_next": (_I32, [_P, _I64, _I64, ctypes.c_uint64, _P]),
    "staging_copy_now": (_I32, [_P, _I64, _I64, ctypes.c_uint64, _P]),
    "staging_host_bytes": (_I64, [_P]),
    "staging_bytes_read": (_I64, [_P]),
}


def load() -> ctypes.CDLL:
    library = testing()
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, f"penstock_test_{name}")
        function.restype, function.argtypes = result, arguments
    library.penstock_test_error.restype = ctypes.c_char_p
    return library


core = load()


def host(name: str, *arguments: object) -> None:
    """One that can fail."""
    code = getattr(core, f"penstock_test_{name}")(*arguments)
    if code:
        raise CoreFailure(code, core.penstock_test_error().decode())


@contextmanager
def host_file(path: Path) -> Iterator[ctypes.c_void_p]:
    file = ctypes.c_void_p()
    host("file_open", os.fsencode(path), ctypes.byref(file))
    try:
        yield file
    finally:
        core.penstock_test_file_close(file)


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
    places = [str(root), str(root / "src")]
    return subprocess.run(
        [sys.executable, *options, "-c", "from tests.runtime.host_cases import *\n" + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )
