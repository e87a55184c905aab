"""A file that is whole or absent: written under `<path>.partial`, renamed when complete, removed on any failure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DiskFullError, WeightsFileError

# What the system says when a file cannot grow: the disk, the quota, the limit on one file's size.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# What it says when a file system cannot reserve space at all.
_NO_RESERVING = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True)
class PartialFile:
    """The open file while it is being written. Bytes that nobody writes read as zero."""

    fd: int
    path: Path
    partial: Path
    total_bytes: int

    def reserve(self) -> None:
        """Asks for all the room before the first byte is written, which may be hours before the last."""
        with self._room():
            try:
                os.posix_fallocate(self.fd, 0, self.total_bytes)
            except OSError as error:
                if error.errno not in _NO_RESERVING:
                    raise
                # The writes themselves will then find out whether there is room.
                os.ftruncate(self.fd, self.total_bytes)

    def write(self, offset_bytes: int, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        with self._room():
            while view:
                written_bytes = os.pwrite(self.fd, view, offset_bytes)
                offset_bytes += written_bytes
                view = view[written_bytes:]

    def shorten(self, total_bytes: int) -> None:
        """Gives back what was reserved and is not needed."""
        os.ftruncate(self.fd, total_bytes)

    def publish(self) -> None:
        """The end of the block does this, if the block has not."""
        if not self.published:
            with self._room():
                os.fsync(self.fd)
                self.partial.replace(self.path)

    @property
    def published(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.stat())
        except FileNotFoundError:
            return False

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            # Give back what was taken. Otherwise the number below would not count the room that our own half takes.
            os.ftruncate(self.fd, 0)
            raise _disk_full(error, self.path, self.total_bytes) from error


@contextmanager
def partial_file(path: Path, total_bytes: int, *, reserved: bool = True) -> Iterator[PartialFile]:
    """`reserved`: ask for all of `total_bytes` first. Without it, they are the most that the file can need."""
    partial = path.with_name(path.name + ".partial")
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise _disk_full(error, path, total_bytes) from error
    try:
        if not _lock(fd, partial):
            raise WeightsFileError(f"{path}: {partial.name} has another writer, needs to be written by one at a time")
        try:
            # A file that a killed writer left behind is no longer locked, and is overwritten.
            os.ftruncate(fd, 0)
            file = PartialFile(fd, path, partial, total_bytes)
            if reserved:
                file.reserve()
            yield file
            file.publish()
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    finally:
        os.close(fd)


@contextmanager
def restored_on_failure(path: Path, followed_by: PartialFile) -> Iterator[None]:
    """If the block fails, `path` is what it was before: the same file, or none.

    For a file that is published just before another one that belongs to it. Once that one is there, both stay.
    """
    previous = path.with_name(path.name + ".previous")
    previous.unlink(missing_ok=True)  # from a process that was killed
    existed = os.path.lexists(path)
    if existed:
        # A second name (of the link, if it is one) takes no room. On file systems without hard links the older file
        # cannot be kept.
        with contextlib.suppress(OSError):
            os.link(path, previous, follow_symlinks=False)
    try:
        yield
    except BaseException:
        if not followed_by.published:
            if not existed:
                path.unlink(missing_ok=True)
            elif os.path.lexists(previous):
                previous.replace(path)
        raise
    finally:
        previous.unlink(missing_ok=True)


def _lock(fd: int, partial: Path) -> bool:
    """Two writers of one path would write into the same file, and the first to finish would rename both halves."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other writer may have finished, and renamed the file, between our opening and our locking it.
        return os.path.samestat(os.fstat(fd), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _disk_full(error: OSError, path: Path, needed_bytes: int) -> DiskFullError:
    disk = os.statvfs(path.parent)
    free_bytes = disk.f_bavail * disk.f_frsize
    return DiskFullError(
        error.errno, f"{path}: needs {needed_bytes} bytes, {free_bytes} bytes are free: {error.strerror}"
    )
