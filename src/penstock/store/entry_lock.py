"""One maker for each entry of the cache: a locked file beside it, which the kernel unlocks however its holder ends.

The files are never removed: whoever waits for one that is gone, and whoever locks the new one in its place, would both
be let in.
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
    """Whether the lock was had. It is waited for, and `wait` is told for whom; or not at all, where `wait` is None.

    Threads exclude each other as processes do: the lock is of the file as it was opened here.
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
            # A child that was forked meanwhile has the same lock, and must neither take it from its parent nor keep it.
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
        # Empty between the locking and the writing. Only for people: nothing depends on it.
        wait(f"waiting for {printable(os.pread(descriptor, 1000, 0).decode(errors='replace')) or 'another process'}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        # A file system without locks. Two may then make the same entry; the second one takes the place of the first.
        return True
    return True


def _write(descriptor: int, holder: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to fail here
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
