"""Identifies a checkpoint's files without reading their gigabytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.printable import printable
from penstock.regular_file import open_regular

# The limit of the safetensors library, and of penstock.export.safetensors_file, which needs torch.
_LONGEST_HEADER_BYTES = 100_000_000


def weights_key(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Part of a cache key. Changes when a shard is replaced or overwritten, unless its time was set back as well.

    Links are followed: a checkpoint of the Hugging Face hub is a folder of links to files with other names.
    """
    return [_shard_key(path) for path in files]


def _shard_key(path: Path) -> dict[str, Any]:
    with open_regular(path, CheckpointError) as file:
        try:
            found = os.fstat(file.fileno())
            length = _read(file.fileno(), 8, 0)
            length_bytes = int.from_bytes(length, "little")
            if len(length) < 8 or length_bytes > min(found.st_size - 8, _LONGEST_HEADER_BYTES):
                raise CheckpointError(
                    f"{printable(str(path))} is not a safetensors file: its header would have {length_bytes} bytes"
                )
            header = _read(file.fileno(), length_bytes, 8)
        except OSError as error:
            raise CheckpointError(f"{printable(str(path))} cannot be read: {error.strerror}") from error
    return {
        "name": path.name,
        "nbytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "header_sha256": hashlib.sha256(header).hexdigest(),
    }


def _read(descriptor: int, nbytes: int, offset_bytes: int) -> bytes:
    """One read may return less than was asked for."""
    pieces = b""
    while len(pieces) < nbytes and (piece := os.pread(descriptor, nbytes - len(pieces), offset_bytes + len(pieces))):
        pieces += piece
    return pieces
