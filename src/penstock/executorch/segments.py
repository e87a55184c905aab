"""Weights on their way from one .ptd to another, without passing through memory as a whole."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import IO

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.tensor import scalar_type_enum
from executorch.exir.tensor_layout import TensorLayout

from penstock.errors import UnsupportedProgramError
from penstock.temporary import TemporaryFolder
from penstock.weight import State, Weight
from penstock.weights.format import SCALAR_TYPES

_PIECE_BYTES = 8 << 20


class Segment(FileBackedData):  # type: ignore[misc]
    """A part of a file, where ExecuTorch expects a whole one."""

    def __init__(self, path: Path, offset_bytes: int, length_bytes: int, folder: TemporaryFolder) -> None:
        super().__init__(str(path))
        self._offset_bytes = offset_bytes
        self._size = length_bytes
        self._digest: bytes | None = None
        self._folder = folder  # which is removed when the last segment goes

    def _read(self, count: int) -> bytes:
        with Path(self._path).open("rb") as file:
            file.seek(self._offset_bytes)
            content = file.read(count)
        if len(content) != count:
            raise OSError(f"{self._path} has {len(content)} bytes at {self._offset_bytes}, needs {count}")
        return content

    def prefix(self, size: int) -> bytes:
        return self._read(min(size, self._size))

    def sha256(self) -> bytes:
        if self._digest is None:
            digest = hashlib.sha256()
            self._pieces(digest.update)
            self._digest = digest.digest()
        return self._digest

    def to_bytes(self) -> bytes:
        return self._read(self._size)

    def write_to_file(self, outfile: io.BufferedIOBase | IO[bytes]) -> None:
        self._pieces(outfile.write)

    def _pieces(self, take: object) -> None:
        assert callable(take)
        left = self._size
        with Path(self._path).open("rb") as file:
            file.seek(self._offset_bytes)
            while left:
                piece = file.read(min(_PIECE_BYTES, left))
                if not piece:
                    raise OSError(f"{self._path} ends {left} bytes before the end of a weight")
                take(piece)
                left -= len(piece)


def tensor_layout(weight: Weight | State) -> TensorLayout:
    if weight.dtype not in SCALAR_TYPES:
        kind = "state" if isinstance(weight, State) else "weight"
        raise UnsupportedProgramError(
            f"{kind} {weight.name!r} has dtype {weight.dtype}, which ExecuTorch does not have"
        )
    scalar_type = scalar_type_enum(getattr(torch, weight.dtype))
    return TensorLayout(scalar_type, list(weight.shape), list(weight.dim_order))
