"""Probes of csrc/open with answers of their own, given by any program. Without torch."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.native.driver import check
from tests.native.driver import library as driver_library

ON_WAIT = CFUNCTYPE(c_int32, c_int64)


@functools.cache
def library() -> ctypes.CDLL:
    found = driver_library()
    functions: dict[str, tuple[Any, list[Any]]] = {
        "answers": (c_void_p, []),
        "answers_destroy": (None, [c_void_p]),
        "probe_begin": (c_int32, [c_char_p, c_int32, c_char_p, c_double, c_void_p, POINTER(c_void_p)]),
        "probe_require": (c_int32, [c_void_p, ON_WAIT]),
        "probe_destroy": (None, [c_void_p]),
        "probe_program": (c_char_p, []),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(found, f"penstock_test_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def shipped_program() -> Path:
    return Path(os.fsdecode(library().penstock_test_probe_program()))


class Answers:
    """What a process remembers."""

    def __init__(self) -> None:
        self.handle = library().penstock_test_answers()

    def close(self) -> None:
        library().penstock_test_answers_destroy(self.handle)


class Probe:
    """Raises DriverFailure."""

    def __init__(
        self, answers: Answers, path: Path, device_index: int, program: Path, *, timeout_s: float = 30.0
    ) -> None:
        self._handle = c_void_p()
        check(
            library().penstock_test_probe_begin(
                os.fsencode(path), device_index, os.fsencode(program), timeout_s, answers.handle, byref(self._handle)
            )
        )

    def require(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """`gives_up` is asked meanwhile."""
        check(library().penstock_test_probe_require(self._handle, ON_WAIT(lambda _: int(gives_up()))))

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        library().penstock_test_probe_destroy(self._handle)
