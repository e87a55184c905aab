"""Opens a file by name: a regular one, or an error that says what it is. Never waits."""

from __future__ import annotations

import io
import os
import stat

from penstock.errors import PenstockError
from penstock.printable import printable

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str], error: type[PenstockError]) -> io.FileIO:
    """For reading, unbuffered. Raises `error`, with the path in the message, whatever is wrong with it."""
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise error(f"{printable(text)}: the path is not UTF-8; torch takes no other: rename the file") from cause
    if "\0" in text:
        raise error(f"{printable(text)}: the path holds a NUL; no file has such a name")
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for somebody to write to it.
        fd = os.open(text, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as cause:
        raise error(f"{printable(text)} does not exist") from cause
    except OSError as cause:
        raise error(f"{printable(text)} cannot be read: {cause.strerror}") from cause
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise error(f"{printable(text)} cannot be read: it is {_KINDS.get(kind, 'something else')}, needs to be a file")
    return io.FileIO(fd, "rb", closefd=True)
