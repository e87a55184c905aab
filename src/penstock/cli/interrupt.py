"""Ctrl-C leaves no process behind, whoever started it.

A compiler's driver starts the compiler proper, and killing the driver leaves the compiler running. So this process
adopts its orphans in place of init, passes the signal on to all descendants, and kills what is left at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.errors import OutputPathError
from penstock.temporary import TemporaryFolder

_PR_SET_CHILD_SUBREAPER = 36
# Interrupted processes have this long to remove their temporary files. Then they are killed.
_GRACE_S = 1.0
_POLL_S = 0.02


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, and reaches all children. When it leaves the block, no child is left."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("signals reach the main thread only: call this there")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    came = threading.Event()

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.set()
        _signal_all(signal.SIGINT)
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Libraries turn an interrupt into other exceptions, and cleanup may fail over what the interrupt has ended.
        if came.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        if came.is_set():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            end_children()
        signal.signal(signal.SIGINT, earlier)


def end_children() -> None:
    """Waits a little for every descendant, then kills what is left."""
    deadline_s = time.monotonic() + _GRACE_S
    while _reap() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    while _reap():
        _signal_all(signal.SIGKILL)
        time.sleep(_POLL_S)


def descendants(pid: int) -> list[int]:
    """Parents before their children."""
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    # A process that ends while it is looked at has no children.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def _signal_all(number: signal.Signals) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> bool:
    """Whether any child has not ended yet."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


@contextmanager
def private_temporary_files() -> Iterator[None]:
    """Children put their temporary files into a folder that is removed at the end, even if they were killed."""
    try:
        tempfile.gettempdir()  # this process, and the compiler's cache, stay where they were
        made = TemporaryFolder("cli")
    except OSError as error:
        raise OutputPathError(
            f"there is no room for temporary files: {error}; set TMPDIR to a folder that has"
        ) from error
    earlier = os.environ.get("TMPDIR")
    with made as folder:
        os.environ["TMPDIR"] = str(folder)
        try:
            yield
        finally:
            if earlier is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = earlier
