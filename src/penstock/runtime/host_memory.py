"""How much host memory this process may use, as the core finds it (csrc/open/host_limit.h).

Needs no torch until the native core is called.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limit:
    """How many more bytes can be pinned, and what says so."""

    available_bytes: int
    source: str


def memory_limit_bytes(root: Path = Path("/"), *, pinned_file_bytes: int | None = None) -> Limit:
    """The smallest of the machine's and of every cgroup limit above this process. `root` holds proc/ and sys/."""
    from penstock.native import core
    from penstock.runtime.failures import last_exception

    native, found = core(), ctypes.c_int64()
    pinned_bytes = native.penstock_pinned_bytes() if pinned_file_bytes is None else pinned_file_bytes
    if native.penstock_host_limit(os.fsencode(root), pinned_bytes, ctypes.byref(found)):
        raise last_exception()
    return Limit(found.value, native.penstock_host_limit_text().decode())


_P, _I32, _I64, _PTR = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.POINTER

HOST_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "penstock_host_error": (ctypes.c_char_p, []),
    "penstock_host_file_open": (_I32, [ctypes.c_char_p, _PTR(_P)]),
    "penstock_host_file_close": (None, [_P]),
    "penstock_host_file_data": (_P, [_P]),
    "penstock_host_file_bytes": (_I64, [_P]),
    "penstock_host_file_check": (_I32, [_P]),
    "penstock_host_file_prefault": (_I32, [_P, _I64, _I64, _I32, _PTR(_I64)]),
    "penstock_host_guarded_copy": (_I32, [_P, _P, ctypes.c_size_t]),
    "penstock_host_guarded_touch": (_I32, [_P, ctypes.c_size_t]),
    "penstock_host_register": (_I32, [_P, _P, _PTR(_I64), _I64, _PTR(_P)]),
    "penstock_host_unregister": (None, [_P]),
    "penstock_host_staging_create": (_I32, [_P, _P, _I64, _I32, _I32, _PTR(_P)]),
    "penstock_host_staging_destroy": (None, [_P]),
    "penstock_host_staging_follow": (_I32, [_P, _P, _I64, _P, _I64]),
    "penstock_host_staging_copy_next": (_I32, [_P, _I64, _I64, ctypes.c_uint64, _P]),
    "penstock_host_staging_copy_now": (_I32, [_P, _I64, _I64, ctypes.c_uint64, _P]),
    "penstock_host_staging_host_bytes": (_I64, [_P]),
    "penstock_host_staging_bytes_read": (_I64, [_P]),
}


def declare_host_functions(library: ctypes.CDLL) -> None:
    for name, (result, arguments) in HOST_FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


@functools.cache
def host_core() -> ctypes.CDLL:
    """The native core with the types of its host functions."""
    from penstock.native import core

    library = core()
    declare_host_functions(library)
    return library
