"""The rules of csrc/open by themselves. Without torch."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from tests.native.driver import check
from tests.native.driver import library as driver_library

PAGE = os.sysconf("SC_PAGESIZE")
MOST_CHUNKS = 64
# As in csrc/open/chunks.h.
LIMIT_BYTES = 64 << 30


@functools.cache
def library() -> ctypes.CDLL:
    found = driver_library()
    numbers = POINTER(c_int64)
    functions: dict[str, tuple[Any, list[Any]]] = {
        "chunk_ends": (c_int32, [numbers, c_int64, c_int64, c_int64, c_int64, numbers, c_int64, numbers]),
        "staging_sizes": (c_int32, [c_int64, c_int64, numbers]),
        "check_host_memory": (c_int32, [c_int64, c_char_p, c_char_p]),
        "bytes_to_pin": (c_int32, [c_char_p, c_char_p, numbers]),
        "pin": (c_void_p, [c_char_p]),
        "unpin": (None, [c_void_p]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(found, f"penstock_test_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def chunk_ends(
    extents: Sequence[tuple[int, int]], file_bytes: int, limit_bytes: int = LIMIT_BYTES, page_bytes: int = PAGE
) -> tuple[int, ...]:
    numbers = [number for extent in extents for number in extent]
    given = (c_int64 * len(numbers))(*numbers)
    ends, count = (c_int64 * MOST_CHUNKS)(), c_int64()
    check(
        library().penstock_test_chunk_ends(
            given, len(extents), file_bytes, limit_bytes, page_bytes, ends, MOST_CHUNKS, byref(count)
        )
    )
    assert count.value <= MOST_CHUNKS
    return tuple(ends[: count.value])


def staging_sizes(cap_bytes: int, cores: int) -> tuple[int, ...]:
    """Bytes of a buffer, how many there are, and how many threads read."""
    out = (c_int64 * 3)()
    check(library().penstock_test_staging_sizes(cap_bytes, cores, out))
    return tuple(out)


def check_host_memory(needed_bytes: int, purpose: str, root: Path) -> None:
    check(library().penstock_test_check_host_memory(needed_bytes, purpose.encode(), os.fsencode(root)))


def bytes_to_pin(path: Path, root: Path) -> int:
    out = c_int64()
    check(library().penstock_test_bytes_to_pin(os.fsencode(path), os.fsencode(root), byref(out)))
    return out.value


@contextmanager
def pinned(path: Path) -> Iterator[None]:
    handle = library().penstock_test_pin(os.fsencode(path))
    try:
        yield
    finally:
        library().penstock_test_unpin(handle)
