"""Entries of the cache that are in use. Each has a stamp file, which its users lock; its time is that of the last use.

The kernel unlocks it however they end. Users lock it shared; whoever clears the cache locks it exclusively.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.store.manifest import STAMP_FILE


class Leases:
    """The entries that this process uses on behalf of one store, until close() or the last reference."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._held)

    def take(self, place: Path) -> bool:
        """Whether the entry is there, and stays until it is dropped. Records the use."""
        stamp = _open_stamp(place)
        if stamp is None:
            return False
        try:
            if not _locked(stamp, fcntl.LOCK_SH):
                return False  # it is being cleared
            # It may have been cleared between opening and locking.
            if not os.path.samestat(os.fstat(stamp), (place / STAMP_FILE).lstat()):
                return False
            with contextlib.suppress(OSError):
                os.utime(stamp)
            with self._lock:
                # The older stamp may be of a damaged entry that has been made anew.
                older, self._held[place], stamp = self._held.get(place, -1), stamp, -1
            if older >= 0:
                os.close(older)
            return True
        except FileNotFoundError:
            return False
        finally:
            if stamp >= 0:
                os.close(stamp)

    def drop(self, place: Path) -> None:
        with self._lock:
            stamp = self._held.pop(place, -1)
        if stamp >= 0:
            os.close(stamp)

    def close(self) -> None:
        with self._lock:
            _close_all(self._held)


@contextmanager
def unused(place: Path) -> Iterator[bool]:
    """Yields whether nobody uses the entry. If so, nobody can begin to while the block runs."""
    stamp = _open_stamp(place)
    try:
        yield stamp is None or _locked(stamp, fcntl.LOCK_EX)
    finally:
        if stamp is not None:
            os.close(stamp)


def _open_stamp(place: Path) -> int | None:
    """None if the entry is absent, or is not a folder of ours."""
    try:
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Opened for writing: over NFS, only such a file can be locked exclusively.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(STAMP_FILE, flags, 0o600, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)


def _locked(stamp: int, how: int) -> bool:
    try:
        fcntl.flock(stamp, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: what is open or mapped stays readable, and no more is promised there
    return True


def _close_all(held: dict[Path, int]) -> None:
    while held:
        os.close(held.popitem()[1])
