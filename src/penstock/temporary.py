"""Temporary folders that go with their owner. At the latest, making the next one removes what killed owners left.

Each folder is locked for as long as its owner holds it, and the kernel releases a lock when a process ends, however it
ends. So a folder without a lock has no owner, even if process ids repeat or belong to another container.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

# Nobody else makes names like this one, and no version before this file did. So what has one has a lock, or no owner.
PREFIX = "penstock-held-"


class TemporaryFolder:
    """Removed at the end of its `with`, by remove(), or with the last reference.

    It lies in `base`, by default the system's folder for temporary files. To rename what was made in it, put it on the
    file system of the new name.
    """

    def __init__(self, purpose: str, base: Path | None = None) -> None:
        base = Path(tempfile.gettempdir() if base is None else base).absolute()
        sweep(base)
        self.path, lock = _make(base, purpose)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        self._finalizer()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def sweep(base: Path) -> None:
    """Removes the folders in `base` that are this user's and have lost their owner."""
    for path in base.glob(f"{PREFIX}*"):
        try:
            lock = _lock(path)
        except OSError:
            continue  # it has an owner, is gone already, is not a folder, or is on a file system without locks
        try:
            if lock is not None:
                # What cannot be removed now is left for the next sweep.
                shutil.rmtree(path, ignore_errors=True)
        finally:
            if lock is not None:
                os.close(lock)


def _make(base: Path, purpose: str) -> tuple[Path, int | None]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=base))
        try:
            lock = _lock(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # a sweep came between the making and the locking
        except OSError:
            return path, None  # a file system without locks: a sweep cannot lock it either, and leaves it alone
        except BaseException:
            path.rmdir()
            raise
        if lock is not None:
            return path, lock


def _lock(path: Path) -> int | None:
    """The descriptor that holds the folder; None if it is another user's, or was removed meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and os.path.samestat(found, path.lstat()):
            held, descriptor = descriptor, -1
            return held
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _remove(path: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the folder and its lock are the parent's
    # A child that still writes into it may prevent the removal; without the lock, the next sweep removes it.
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
