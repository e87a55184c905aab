"""Whether the bytes of a .ptd file are still those that were written."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from penstock.errors import ChecksumError, WeightsFileError
from penstock.printable import printable
from penstock.regular_file import open_regular
from penstock.weights.index import Entry, WeightsIndex, read_index

_BUFFER_BYTES = 16 << 20


def verify_checksums(
    path_or_index: str | os.PathLike[str] | WeightsIndex, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Reads every entry once, in the file's order. All bad entries are listed, not the first alone."""
    index = path_or_index if isinstance(path_or_index, WeightsIndex) else read_index(path_or_index)
    for entry in index.entries:
        if entry.checksum is None:
            raise WeightsFileError(
                f"{index.path}: entry {printable(entry.name)!r} has no checksum, needs one to be verified"
            )
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    faults: list[str] = []
    with open_regular(index.path, WeightsFileError) as file:
        for entry in index.unique_entries:
            checksum = _checksum(index, entry, file.fileno(), buffer, on_bytes)
            if checksum != entry.checksum:
                faults.append(f"{printable(entry.name)!r} has {checksum:016x}, needs {entry.checksum:016x}")
    if faults:
        raise ChecksumError(
            f"{index.path}: {len(faults)} of {len(index.unique_entries)} entries are damaged: {'; '.join(faults)}"
        )


def _checksum(
    index: WeightsIndex, entry: Entry, fd: int, buffer: memoryview, on_bytes: Callable[[int], None] | None
) -> int:
    digest = xxhash.xxh3_64()
    read_bytes = 0
    while read_bytes < entry.length_bytes:
        piece = buffer[: entry.length_bytes - read_bytes]
        count_bytes = os.preadv(fd, [piece], entry.offset_bytes + read_bytes)
        if count_bytes == 0:
            raise WeightsFileError(
                f"{index.path}: truncated: entry {printable(entry.name)!r} has {read_bytes} bytes,"
                f" needs {entry.length_bytes}"
            )
        digest.update(piece[:count_bytes])
        read_bytes += count_bytes
        if on_bytes is not None:
            on_bytes(count_bytes)
    return digest.intdigest()
