"""Sessions over sources that tests choose, by chunks and by buffers; and what only compiled code asks of a session."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from penstock.runtime.driver import Driver
from penstock.runtime.failures import exception
from penstock.runtime.records import Numbers
from penstock.runtime.session import Session, flat
from tests.native.driver import library


@dataclass(frozen=True)
class HostSource:
    """How the bytes of the file reach the device: registered in chunks, or through staging buffers."""

    chunk_ends: tuple[int, ...] = ()
    staging_buffer_bytes: int = 0
    staging_buffers: int = 0
    staging_threads: int = 0


class HasHandle(Protocol):
    @property
    def handle(self) -> int | None: ...


def make_session(
    driver: HasHandle,
    path: Path,
    source: HostSource,
    *,
    extents: Sequence[tuple[int, int]],
    lru: bool,
    device_index: int,
    poison: bool,
    packed: Numbers | None = None,
) -> Session:
    """`extents`: as in FileSource. `packed`: the records of weights that are packed in the file."""
    ends = (ctypes.c_int64 * len(source.chunk_ends))(*source.chunk_ends)
    create = library().penstock_test_session_create
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    create.restype = i32
    create.argtypes = [
        *(pointer, ctypes.c_char_p, pointer, i64, i32, pointer, i64),
        *(i64, i32, i32, i32, i32, pointer, i64, pointer),
    ]
    handle = pointer()
    failure = create(
        driver.handle, str(path).encode(), flat(extents), len(extents), int(lru), ends, len(ends),
        source.staging_buffer_bytes, source.staging_buffers, source.staging_threads,
        device_index, int(poison), packed, 0 if packed is None else len(packed), ctypes.byref(handle),
    )  # fmt: skip
    if failure:
        raise exception(failure, library().penstock_test_error().decode())
    assert handle.value is not None
    # All that a session asks of a driver is its handle.
    return Session(cast(Driver, driver), handle.value)


def uninstall(session: Session) -> None:
    """Gives its plan up: it has none then."""
    function = library().penstock_test_session_uninstall
    function.argtypes = [ctypes.c_void_p]
    failure = function(session.handle)
    if failure:
        raise exception(failure, library().penstock_test_error().decode())


def multiply_and_fail(*, out_of_memory: bool) -> None:
    """As compiled code multiplies, with what throws something of the C++ library."""
    failure = library().penstock_test_failing_linear(ctypes.c_int32(out_of_memory))
    if failure:
        raise exception(failure, library().penstock_test_error().decode())


def acquire(session: Session, number: int, address: object) -> int:
    """As compiled code fetches the weight of an access: nonzero where the session refuses."""
    function = library().penstock_test_session_acquire
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return int(function(session.handle, number, address))


def take_rows(
    session: Session, number: int, index: ctypes.Array[ctypes.c_int64], out: ctypes.Array[ctypes.c_ubyte]
) -> int:
    """As compiled code takes experts by an index: nonzero where the session refuses."""
    function = library().penstock_test_session_take_rows
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64, ctypes.c_uint64] * 2]
    return int(function(session.handle, number, ctypes.addressof(index), len(index), ctypes.addressof(out)))


def done(session: Session, step: int) -> None:
    function = library().penstock_test_session_done
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    function(session.handle, step)


def copy_stream(session: Session) -> int:
    """The stream that copies run on, as the driver names it."""
    return _stream(session, "copy")


def link_stream(session: Session) -> int:
    """The one on which packed weights cross the link."""
    return _stream(session, "link")


def _stream(session: Session, which: str) -> int:
    function = getattr(library(), f"penstock_test_session_{which}_stream")
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    return int(function(session.handle))
