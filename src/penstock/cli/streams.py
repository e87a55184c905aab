"""Standard streams as a command needs them: always there, and able to take every name."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STDIN, _STDOUT, _STDERR = 0, 1, 2


@contextmanager
def standard_streams() -> Iterator[None]:
    """A stream that our caller closed is a hole: the next file that is opened would take its number, and native code
    would print into that file. A closed stdout becomes a pipe that nobody reads, so that writing to it fails as it does
    for `| head -0`. A closed stdin or stderr becomes /dev/null."""
    _fill_holes()
    earlier = sys.stdout.errors if isinstance(sys.stdout, io.TextIOWrapper) else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escapes names that the terminal's encoding lacks; stderr does so by itself.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.closed:
            sys.stdout.reconfigure(errors=earlier)


def _fill_holes() -> None:
    closed = [number for number in (_STDIN, _STDOUT, _STDERR) if not _is_open(number)]
    for number in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
    if _STDOUT in closed:
        reader, writer = os.pipe()
        os.dup2(writer, _STDOUT)
        os.close(reader)
        os.close(writer)
    # Python has no stream object if there was a hole when it started.
    if sys.stdout is None:
        sys.stdout = os.fdopen(_STDOUT, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STDERR, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def nobody_reads() -> bool:
    """Whether stdout or stderr is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    poll.register(_STDERR, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def drop_stdout() -> None:
    """Discards what is still buffered: Python would try to write it again at exit, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _STDOUT)
    os.close(null)
