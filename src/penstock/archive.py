"""Checks a .pt2 as an archive, as a whole, before anything looks inside. No torch.

torch writes members one after the other, without compression, in one folder. Everything else is refused by name:
members that are compressed, encrypted, duplicate or overlapping. So a reader needs no more memory than the file has
bytes, and what is checked here is what torch's own reader finds later.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from penstock.errors import PackageError
from penstock.printable import printable
from penstock.torch_private.archive_layout import CODE_FOLDER

__all__ = ["CODE_FOLDER"]

METADATA_FILE = "penstock.json"

# A program holds code and no weights, so it takes megabytes. Anything larger is something else.
ARCHIVE_LIMIT_BYTES = 1 << 30
METADATA_LIMIT_BYTES = 1 << 24
MEMBERS_LIMIT = 1 << 16

_PIECE_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# What zipfile raises over a damaged archive, or one of a kind that torch never writes.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
)


class NoMetadataError(PackageError):
    """An archive that may be a .pt2, but is not one of ours."""


@dataclass(frozen=True)
class CodeFile:
    """A file of compiled code: its name under the archive's folder, and what must be in it."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    description: bytes
    code: tuple[CodeFile, ...]


def read_archive(file: BinaryIO, shown: str) -> Archive:
    """Reads every byte once and compares every CRC. `shown` is the name of the file in messages."""
    file_bytes = file.seek(0, os.SEEK_END)
    if file_bytes > ARCHIVE_LIMIT_BYTES:
        raise PackageError(f"{shown} has {file_bytes} bytes, a program needs at most {ARCHIVE_LIMIT_BYTES}")
    with _refusing(shown), zipfile.ZipFile(cast(BinaryIO, _Bounded(file, file_bytes))) as archive:
        members = archive.infolist()
        names = [info.filename for info in members]
        described = [name for name in names if name.endswith(f"/extra/{METADATA_FILE}")]
        if len(described) != 1:
            text = f"{shown} is not a weightless program: it has {len(described)} {METADATA_FILE}, needs one"
            # If the name is somewhere in the file and no member has it, the archive's directory is damaged.
            if described or _mentions(file, f"/extra/{METADATA_FILE}".encode()):
                raise PackageError(f"{text}: it is damaged")
            raise NoMetadataError(text)
        folder = described[0].removesuffix(f"extra/{METADATA_FILE}")
        _check_members(members, folder, shown)
        description = b""
        code: list[CodeFile] = []
        for info, start in zip(members, _starts(file, members, archive.start_dir, shown), strict=True):
            digest = _read(file, info, start, shown)
            name = info.filename.removeprefix(folder)
            if info.filename == described[0]:
                description = _bytes(file, start, info.file_size)
            elif name.startswith(CODE_FOLDER):
                code.append(CodeFile(name, info.file_size, digest))
    return Archive(description, tuple(sorted(code, key=lambda entry: entry.name)))


def _mentions(file: BinaryIO, name: bytes) -> bool:
    file.seek(0)
    kept = b""
    while piece := file.read(_PIECE_BYTES):
        if name in kept + piece:
            return True
        kept = piece[-len(name) :]
    return False


class _Bounded:
    """Limits each read: zipfile reads the directory in one piece, as long as the archive says it is."""

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self._file = file
        self._file_bytes = file_bytes
        self.seek, self.tell = file.seek, file.tell

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        left = max(self._file_bytes - self._file.tell(), 0)
        wanted = left if count < 0 else min(count, left)
        if wanted > METADATA_LIMIT_BYTES:
            raise zipfile.BadZipFile(f"its directory has {wanted} bytes, needs at most {METADATA_LIMIT_BYTES}")
        return self._file.read(wanted)


def _check_members(members: list[zipfile.ZipInfo], folder: str, shown: str) -> None:
    if len(members) > MEMBERS_LIMIT:
        raise PackageError(f"{shown} has {len(members)} members, a program needs at most {MEMBERS_LIMIT}")
    seen: set[str] = set()
    for info in members:
        name = printable(info.filename)
        if info.filename in seen:
            raise PackageError(f"{shown} has the member {name} twice")
        seen.add(info.filename)
        if not info.filename.startswith(folder) or ".." in info.filename.split("/"):
            raise PackageError(f"{shown} has the member {name}, needs all of them in {printable(folder)}")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise PackageError(f"{shown}: the member {name} is compressed or encrypted, which torch never writes")
        if info.filename.endswith(f"/extra/{METADATA_FILE}") and info.file_size > METADATA_LIMIT_BYTES:
            raise PackageError(f"{shown}: {name} has {info.file_size} bytes, needs at most {METADATA_LIMIT_BYTES}")


def _starts(file: BinaryIO, members: list[zipfile.ZipInfo], end_bytes: int, shown: str) -> Iterator[int]:
    """Where each member's bytes begin. Members must lie apart, the first at offset 0, and say their name twice."""
    order = sorted(members, key=lambda info: info.header_offset)
    ends = dict(zip((info.filename for info in order), [*(i.header_offset for i in order[1:]), end_bytes], strict=True))
    if order and order[0].header_offset != 0:
        raise PackageError(f"{shown} has {order[0].header_offset} bytes before its first member, needs none")
    for info in members:
        name = printable(info.filename)
        header = _bytes(file, info.header_offset, _LOCAL_HEADER.size)
        magic, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        stored = _bytes(file, info.header_offset + _LOCAL_HEADER.size, name_bytes)
        if magic != b"PK\3\4" or flags & 1 or method != zipfile.ZIP_STORED or stored != info.orig_filename.encode():
            raise PackageError(f"{shown}: the member {name} has a header that is not its own: the archive is damaged")
        if start + info.file_size > ends[info.filename]:
            raise PackageError(f"{shown}: the member {name} reaches into what follows it: the archive is damaged")
        yield start


def _read(file: BinaryIO, info: zipfile.ZipInfo, start: int, shown: str) -> str:
    """The SHA-256 of a member, whose CRC must be right."""
    crc, digest, left = 0, hashlib.sha256(), info.file_size
    file.seek(start)
    while left:
        piece = file.read(min(_PIECE_BYTES, left))
        if not piece:
            raise PackageError(f"{shown} was truncated while it was read")
        crc, left = zlib.crc32(piece, crc), left - len(piece)
        digest.update(piece)
    if crc != info.CRC:
        raise PackageError(
            f"{shown}: the member {printable(info.filename)} is damaged: its bytes have the CRC {crc:08x}, the archive "
            f"says {info.CRC:08x}; nothing of it was run"
        )
    return digest.hexdigest()


def _bytes(file: BinaryIO, start: int, count: int) -> bytes:
    file.seek(start)
    return file.read(count)


@contextmanager
def _refusing(shown: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        told = printable(str(error))[:200]
        raise PackageError(f"{shown} is not a .pt2 archive, or is damaged: {told}") from error
