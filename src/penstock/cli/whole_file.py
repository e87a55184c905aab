"""A file that is whole or absent, even after Ctrl-C."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import OutputPathError, PenstockError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to. When the block succeeds, that file replaces `path`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if isinstance(error, PenstockError):
            raise  # says more already
        raise OutputPathError(f"{path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    with whole_file(path) as partial:
        partial.write_bytes(content)


def refuse_unwritable(*paths: Path | None) -> None:
    """Refuses early what would fail only at the end, or would replace a device."""
    for path in paths:
        if path is None:
            continue
        if not _is_folder(path.parent):
            raise OutputPathError(f"{path} cannot be written: the folder {path.parent} does not exist")
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:  # a name that is too long, for one
            raise OutputPathError(f"{path} cannot be written: {error.strerror}") from error
        if stat.S_ISDIR(mode):
            raise OutputPathError(f"{path} cannot be written: it is a folder")
        if not stat.S_ISREG(mode):
            raise OutputPathError(f"{path} cannot be written: it is not a file, and one would take its place")


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False
