"""How much host memory this process may use, as the core finds it (csrc/open/host_limit.h).

Needs no torch until the native core is called.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limit:
    """How many more bytes can be pinned, and where that limit comes from."""

    available_bytes: int
    source: str


def memory_limit_bytes(root: Path = Path("/"), *, pinned_file_bytes: int | None = None) -> Limit:
    """The smallest of the machine's limit and those of all cgroups above this process. `root` holds proc/ and sys/."""
    from penstock.native import core
    from penstock.runtime.failures import last_exception

    native, found = core(), ctypes.c_int64()
    pinned_bytes = native.penstock_pinned_bytes() if pinned_file_bytes is None else pinned_file_bytes
    if native.penstock_host_limit(os.fsencode(root), pinned_bytes, ctypes.byref(found)):
        raise last_exception()
    return Limit(found.value, native.penstock_host_limit_text().decode())
