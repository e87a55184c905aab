"""The end of a .pte that penstock.executorch.export wrote: a hash of everything before it.

ExecuTorch reads a .pte by the lengths in its header and ignores what follows. Its own parts, which say what runs in
which order, have no checksum; with this one, damage anywhere is found before anything is loaded. A .pte that was
lowered with ExecuTorch's own tools has no seal, and is accepted without one.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import BinaryIO

from penstock.errors import PackageError
from penstock.executorch.signatures import SIGNATURES_METHOD
from penstock.printable import printable
from penstock.regular_file import open_regular

END_MAGIC = b"PNSTKEND"
# Magic, bytes before it, SHA-256 of them.
_END = struct.Struct("<8sQ32s")
_PIECE_BYTES = 8 << 20


def append_seal(file: BinaryIO) -> None:
    """`file` is open for reading and writing, and complete but for its seal."""
    length_bytes = file.seek(0, os.SEEK_END)
    digest = _digest(file, length_bytes)
    file.seek(length_bytes)
    file.write(_END.pack(END_MAGIC, length_bytes, digest))


def check_seal(path: Path) -> None:
    """Raises PackageError if a file of ours is not as it was written, or if the path is no file."""
    shown = printable(str(path))
    with open_regular(path, PackageError) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        body_bytes = max(0, file_bytes - _END.size)
        file.seek(body_bytes)
        end = file.read(_END.size)
        if end[:8] != END_MAGIC:
            if file_bytes and _is_ours(file):
                raise PackageError(f"{shown} is damaged or truncated: it was written with a seal at its end")
            return
        _, length_bytes, digest = _END.unpack(end)
        if length_bytes != body_bytes or digest != _digest(file, body_bytes):
            raise PackageError(
                f"{shown} is damaged: its bytes do not have the hash that its seal names; nothing of it was run"
            )


def _is_ours(file: BinaryIO) -> bool:
    """Only our export gives a program this method."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(SIGNATURES_METHOD.encode()) >= 0


def _digest(file: BinaryIO, count_bytes: int) -> bytes:
    digest, left = hashlib.sha256(), count_bytes
    file.seek(0)
    while left:
        piece = file.read(min(_PIECE_BYTES, left))
        if not piece:
            raise PackageError("the program was truncated while it was read")
        digest.update(piece)
        left -= len(piece)
    return digest.digest()
