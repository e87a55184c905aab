"""Where the cache lies, and whether it may be trusted: programs in it are loaded, which runs their code."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import DiskFullError, OutputPathError
from penstock.printable import printable

FOLDER_VARIABLE = "PENSTOCK_CACHE_DIR"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder(given: Path | None = None) -> Path:
    """What was given, or $PENSTOCK_CACHE_DIR, $XDG_CACHE_HOME/penstock, ~/.cache/penstock. It may not exist."""
    if given is not None:
        return Path(os.path.abspath(_expanded(given)))  # noqa: PTH100 (links stay: the message shows what was given)
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return cache_folder(Path(named))
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(shared) if Path(shared).is_absolute() else _expanded(Path("~/.cache"))
    return base / "penstock"


def make_private(folder: Path) -> None:
    """Makes the folder, for this user alone, if there is none. Then checks it."""
    with writing(folder):
        try:
            folder.mkdir(mode=0o700, parents=True)
            folder.chmod(0o700)  # whatever the umask says
        except FileExistsError:
            pass
    check_private(folder)


def check_private(folder: Path) -> None:
    """Loading a program runs its native code: nobody else may be able to put one there."""
    shown = printable(str(folder))
    try:
        found = folder.stat()
    except OSError as error:
        raise OutputPathError(f"the cache folder {shown} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise OutputPathError(f"the cache folder {shown} cannot be used: it is not a folder")
    if found.st_uid != os.geteuid():
        raise OutputPathError(
            f"the cache folder {shown} belongs to user {found.st_uid}, needs to belong to user {os.geteuid()}, who "
            f"runs this: programs in it are loaded, which runs their code. Name another one, with cache_dir or "
            f"${FOLDER_VARIABLE}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OutputPathError(
            f"the cache folder {shown} has mode {stat.S_IMODE(found.st_mode):04o}, others may write to it: programs in "
            f"it are loaded, which runs their code. Run chmod go-w on it"
        )


def require_space(folder: Path, needed_bytes: int) -> None:
    """DiskFullError unless `needed_bytes` are free where the folder is, or will be."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    with writing(folder):
        disk = os.statvfs(existing)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < needed_bytes:
        raise DiskFullError(
            errno.ENOSPC,
            f"the cache folder {printable(str(folder))}: needs {needed_bytes} bytes, {free_bytes} bytes are free. Run "
            f"penstock cache clear, or name a folder on another disk, with cache_dir or ${FOLDER_VARIABLE}",
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns a system error on the cache's own files into one that names the cache."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno in _NO_ROOM else OutputPathError
        shown = printable(str(folder))
        raise kind(error.errno, f"the cache folder {shown} cannot be written to: {error.strerror}") from error


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise OutputPathError(
            f"{printable(str(path))}: no home folder is known. Name a cache folder, with cache_dir or "
            f"${FOLDER_VARIABLE}"
        ) from error
