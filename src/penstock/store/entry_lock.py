"""One maker for each entry of the cache: a locked file beside it, which the kernel unlocks however its holder ends.

The files are never removed. Otherwise a process that waits for a removed file, and one that locks the new file in its
place, would both get in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.printable import printable
from penstock.store.cache_folder import writing


@contextmanager
def entry_lock(path: Path, does: str, wait: Callable[[str], None] | None) -> Iterator[bool]:
    """Yields whether it got the lock. Waits for it, and tells `wait` for whom; if `wait` is None, does not wait.

    Threads exclude each other as processes do: the lock belongs to the file as it was opened here.
    """
    with writing(path.parent):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(descriptor, wait):
            yield False
            return
        owner = os.getpid()
        _write(descriptor, f"process {owner}, which {does}")
        try:
            yield True
        finally:
            # A child forked meanwhile has the same lock, and must neither take it from its parent nor keep it.
            if os.getpid() == owner:
                _write(descriptor, "")
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: Callable[[str], None] | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait is None:
            return False
        # The file is empty between locking and writing. Its text is only for people: nothing depends on it.
        wait(f"waiting for {printable(os.pread(descriptor, 1000, 0).decode(errors='replace')) or 'another process'}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        # A file system without locks. Two processes may then make the same entry; the second replaces the first.
        return True
    return True


def _write(descriptor: int, holder: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to fail here
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
