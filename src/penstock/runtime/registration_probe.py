"""Whether one page of a file can be registered with a device, found out in a child process.

On some machines registering a mapping never returns, and a thread that waits in the driver cannot be stopped; a process
can. `python -m penstock.runtime.registration_probe <path> <device index>` is the child; it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import RegistrationError
from penstock.runtime.interrupts import deliver_interrupt

# Exit codes of the child. Anything else is a crash.
SUPPORTED = 0
UNSUPPORTED = 3  # the device says that it cannot
REFUSED = 4  # a call failed
UNREADABLE = 5  # the file could not be mapped
NO_DRIVER = 6

_HOST_REGISTER_SUPPORTED = 99
_READ_ONLY_HOST_REGISTER_SUPPORTED = 113
_REGISTER_READ_ONLY = 0x08

_REMEDY = 'give host_memory= a cap, as in host_memory="1GiB", which needs no registration'

# A process that waits in the kernel outlives even SIGKILL; the parent must not wait for it for ever.
_KILL_GRACE_S = 5.0

_lock = threading.Lock()
# What each (device, file system) answered; None for success. A driver does not change its mind within a process.
_answers: dict[tuple[int, int], str | None] = {}


class RegistrationProbe:
    """A child that tries. It is begun here and asked later, so that its start goes on beside other work.

    Asked once per process, device and file system: where the answer is known there is no child.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device_index: int,
        timeout_s: float = 30.0,
        *,
        command: Sequence[str] = (sys.executable, "-m", "penstock.runtime.registration_probe"),
    ) -> None:
        self._path = os.fspath(path)
        self._device_index = device_index
        self._timeout_s = timeout_s
        self._key = (device_index, Path(path).stat().st_dev)
        self._child = None if self._key in _answers else _start([*command, self._path, str(device_index)])

    def require(self) -> None:
        """Waits for the answer. Raises RegistrationError when the file cannot be registered."""
        with _lock:
            if self._key not in _answers:
                assert self._child is not None, "there is a child unless there was an answer, and answers stay"
                child, self._child = self._child, None
                _answers[self._key] = _answer(child, self._timeout_s)
            problem = _answers[self._key]
        if problem is not None:
            raise RegistrationError(
                f"weights file {self._path} cannot be registered with device {self._device_index}: {problem}; {_REMEDY}"
            )

    def close(self) -> None:
        """Nobody will ask any more, or another's child has answered."""
        if self._child is not None:
            child, self._child = self._child, None
            _kill(child)


def probe_registration(
    path: str | os.PathLike[str],
    device_index: int,
    timeout_s: float = 30.0,
    *,
    command: Sequence[str] = (sys.executable, "-m", "penstock.runtime.registration_probe"),
) -> None:
    """Begins and asks at once."""
    with contextlib.closing(RegistrationProbe(path, device_index, timeout_s, command=command)) as probe:
        probe.require()


def _start(command: list[str]) -> subprocess.Popen[str]:
    # The child must find this package as this process did, whatever put it on the path.
    package_root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    python_path = package_root if not inherited else package_root + os.pathsep + inherited
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": python_path},
        start_new_session=True,
        text=True,
        errors="replace",
    )


def _answer(child: subprocess.Popen[str], timeout_s: float) -> str | None:
    """The problem in words, or None."""
    try:
        output, _ = child.communicate(timeout=timeout_s)
        # An interrupt at the terminal ends no child in a session of its own, but the answer is not wanted any more.
        deliver_interrupt()
    except subprocess.TimeoutExpired:
        return f"registering one page did not return within {timeout_s:g} s: the driver hangs ({_kill(child)})"
    except BaseException:
        _kill(child)
        raise
    last_line = (output.strip().splitlines() or ["it said nothing"])[-1]
    if child.returncode == SUPPORTED:
        return None
    if child.returncode in (UNSUPPORTED, REFUSED, UNREADABLE, NO_DRIVER):
        return last_line
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return f"the process that tried one page was ended by {name}: {last_line}"
    return f"the process that tried one page ended with code {child.returncode}: {last_line}"


def _kill(child: subprocess.Popen[str]) -> str:
    # An interrupt at the terminal may have ended it already.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.communicate(timeout=_KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        return f"process {child.pid} could not be killed either: it waits in the kernel"
    return "the process that tried was killed"


def main(arguments: Sequence[str]) -> int:
    path, device_index = arguments
    code, text = _try_one_page(path, int(device_index))
    print(text, flush=True)
    return code


class _Refusal(Exception):
    pass


def _try_one_page(path: str, device_index: int) -> tuple[int, str]:
    try:
        page = _map_one_page(path)
    except OSError as error:
        return UNREADABLE, f"one page of it could not be mapped: {error.strerror}"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return NO_DRIVER, f"there is no CUDA driver on this machine: {error}"
    try:
        return _register(cuda, device_index, page)
    except _Refusal as refusal:
        return REFUSED, str(refusal)


def _map_one_page(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size == 0:
            raise OSError(0, "the file is empty")
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        # Python's own mmap gives out no address of a read-only mapping. Shared: a private one hangs the driver.
        address = libc.mmap(None, _page_bytes(), 0x1, 0x1, descriptor, 0)  # PROT_READ, MAP_SHARED
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(address)
    finally:
        os.close(descriptor)


def _register(cuda: ctypes.CDLL, device_index: int, page: int) -> tuple[int, str]:
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    _call(cuda, "cuInit", ctypes.c_uint(0))
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_index))
    for attribute, what in (
        (_HOST_REGISTER_SUPPORTED, "registering host memory"),
        (_READ_ONLY_HOST_REGISTER_SUPPORTED, "registering read-only host memory"),
    ):
        value = ctypes.c_int()
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
        if not value.value:
            return UNSUPPORTED, f"the device does not support {what} (attribute {attribute} is 0)"
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(cuda, "cuCtxSetCurrent", context)
    start, length = ctypes.c_void_p(page), ctypes.c_size_t(_page_bytes())
    _call(cuda, "cuMemHostRegister_v2", start, length, ctypes.c_uint(_REGISTER_READ_ONLY))
    _call(cuda, "cuMemHostUnregister", start)
    return SUPPORTED, "one page was registered and unregistered"


def _call(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise _Refusal(f"{name} failed: {words} ({code})")


def _page_bytes() -> int:
    return os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
