"""The native core, loaded once, and its C functions with their types."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch  # noqa: F401  the core finds torch's functions in the process

from penstock.errors import PenstockError

_LIBRARY = Path(__file__).parent / "libpenstock.so"

_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "penstock_poison_create": (
        ctypes.c_void_p,
        [ctypes.c_int64] + [ctypes.c_void_p] * 4 + [ctypes.c_int64, ctypes.c_int32],
    ),
    "penstock_create_error": (ctypes.c_char_p, []),
    "penstock_poison_begin": (None, [ctypes.c_void_p]),
    "penstock_poison_end": (ctypes.c_int32, [ctypes.c_void_p]),
    "penstock_poison_error": (ctypes.c_char_p, [ctypes.c_void_p]),
    "penstock_poison_owns": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_void_p]),
    "penstock_poison_peak_bytes": (ctypes.c_int64, [ctypes.c_void_p]),
    "penstock_poison_destroy": (None, [ctypes.c_void_p]),
}


@functools.cache
def core() -> ctypes.CDLL:
    """The core. RTLD_GLOBAL, because compiled programs find its fetch function in the global scope."""
    if not _LIBRARY.exists():
        raise PenstockError(
            f"the native core {_LIBRARY} is missing; build it with `python setup.py build_ext --inplace` or reinstall"
        )
    library = ctypes.CDLL(str(_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
