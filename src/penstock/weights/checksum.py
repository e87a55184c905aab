"""Whether the bytes of a .ptd file are still those that were written."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from penstock.errors import ChecksumError, WeightsFileError
from penstock.printable import printable
from penstock.regular_file import open_regular
from penstock.weights.block_codec import Workers, workers
from penstock.weights.index import Entry, WeightsIndex, read_index
from penstock.weights.packed_format import Packing
from penstock.weights.packed_reader import blocks_of
from penstock.weights.raw_chunks import chunks_by

_BUFFER_BYTES = 16 << 20


def verify_checksums(
    path_or_index: str | os.PathLike[str] | WeightsIndex, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Reads every entry once, in the file's order. Lists all bad entries, not only the first.

    A packed entry has two checksums: one of the stored bytes, one of what they unpack to.
    """
    index = path_or_index if isinstance(path_or_index, WeightsIndex) else read_index(path_or_index)
    for entry in index.entries:
        if entry.checksum is None:
            raise WeightsFileError(
                f"{index.path}: entry {printable(entry.name)!r} has no checksum, needs one to be verified"
            )
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    faults: list[str] = []
    with open_regular(index.path, WeightsFileError) as file, workers() as held:
        for entry in index.unique_entries:
            if entry.packing is None:
                checksum = _checksum(index, entry, file.fileno(), buffer, on_bytes)
                fault = None if checksum == entry.checksum else f"has {checksum:016x}, needs {entry.checksum:016x}"
            else:
                fault = _packed_fault(held, index, entry, entry.packing, file.fileno(), buffer, on_bytes)
            if fault is not None:
                faults.append(f"{printable(entry.name)!r} {fault}")
    if faults:
        raise ChecksumError(
            f"{index.path}: {len(faults)} of {len(index.unique_entries)} entries are damaged: {'; '.join(faults)}"
        )


def _packed_fault(
    held: Workers,
    index: WeightsIndex,
    entry: Entry,
    packing: Packing,
    fd: int,
    buffer: memoryview,
    on_bytes: Callable[[int], None] | None,
) -> str | None:
    stored, raw = xxhash.xxh3_64(), xxhash.xxh3_64()

    def on_stored(chunk: memoryview) -> None:
        stored.update(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))

    try:
        blocks_of(index, entry, fd)
    except WeightsFileError as error:
        # Without header and table there is nothing to unpack. The next entry is checked all the same.
        checksum = _checksum(index, entry, fd, buffer, on_bytes)
        return f"has {checksum:016x} as packed, needs {packing.checksum:016x} ({error})"
    for chunk in chunks_by(held, index, entry, fd, on_stored):
        raw.update(chunk)
    if stored.intdigest() != packing.checksum:
        return f"has {stored.intdigest():016x} as packed, needs {packing.checksum:016x}"
    if raw.intdigest() != entry.checksum:
        return f"unpacks to {raw.intdigest():016x}, needs {entry.checksum:016x}"
    return None


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
