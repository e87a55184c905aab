"""Where the blocks of a packed entry lie: its header and its table, every number of them checked."""

from __future__ import annotations

import itertools
import os
import sys
from array import array
from dataclasses import dataclass
from typing import NoReturn

from penstock.errors import WeightsFileError
from penstock.printable import printable
from penstock.regular_file import open_regular
from penstock.weights.index import Entry, WeightsIndex
from penstock.weights.packed_format import (
    BLOCK_RAW_BYTES,
    HEADER,
    MAGIC,
    UNIT_BYTES,
    VERSIONS,
    block_count,
    block_limits_bytes,
    layout_checksum,
    table_end_bytes,
)


@dataclass(frozen=True)
class Blocks:
    """The blocks of one packed entry. All but the last hold BLOCK_RAW_BYTES of it."""

    kind: int
    raw_bytes: int
    # From the start of the file to the first block.
    data_offset_bytes: int
    # Where each block begins, counted from the first one, and where the last ends: int64, as the core takes them.
    begins_bytes: array[int]


def read_blocks(index: WeightsIndex, entry: Entry) -> Blocks:
    """Reads the header and the table of a packed entry, and checks them against the index."""
    with open_regular(index.path, WeightsFileError) as file:
        return blocks_of(index, entry, file.fileno())


def blocks_of(index: WeightsIndex, entry: Entry, fd: int) -> Blocks:
    """read_blocks() on an open file."""
    if entry.packing is None:
        _fail(index, entry, "is not packed")
    count = block_count(entry.raw_bytes)
    end_bytes = table_end_bytes(count)
    head = os.pread(fd, end_bytes, entry.offset_bytes)
    if len(head) != end_bytes:
        _fail(index, entry, f"is truncated: header and table have {len(head)} bytes, need {end_bytes}")
    magic, version, *numbers = HEADER.unpack_from(head)
    if magic != MAGIC:
        _fail(index, entry, f"has identifier {magic!r}, needs {MAGIC!r}")
    needed_version = VERSIONS[entry.packing.kind]
    if version != needed_version:
        hint = ": a newer Penstock wrote it" if version > max(VERSIONS.values()) else ""
        _fail(index, entry, f"is packed in version {version}, {entry.dtype} needs {needed_version}{hint}")
    *numbers, layout = numbers
    needed = (entry.packing.kind, entry.raw_bytes, BLOCK_RAW_BYTES, count)
    names = ("kind", "raw bytes", "raw bytes per block", "block count")
    for name, has, needs in zip(names, numbers, needed, strict=True):
        if has != needs:
            _fail(index, entry, f"has {name} {has}, needs {needs}")
    needed_layout = layout_checksum(entry.dtype, entry.shape, entry.dim_order)
    if layout not in (0, needed_layout):
        _fail(index, entry, f"has layout checksum {layout:016x}, needs {needed_layout:016x}")
    if any(head[HEADER.size + 4 * count :]):
        _fail(index, entry, "has bytes behind its block table, needs zeros there")
    begins_bytes = _begins(index, entry, entry.packing.kind, head[HEADER.size : HEADER.size + 4 * count])
    if end_bytes + begins_bytes[-1] != entry.length_bytes:
        _fail(index, entry, f"has {entry.length_bytes} bytes, its block table needs {end_bytes + begins_bytes[-1]}")
    return Blocks(entry.packing.kind, entry.raw_bytes, entry.offset_bytes + end_bytes, begins_bytes)


def require_raw(index: WeightsIndex, doing: str) -> None:
    """For readers that take the bytes of entries as they lie in the file. `doing` says what for: "running a .pte"."""
    for entry in index.entries:
        if entry.packing is not None:
            _fail(
                index,
                entry,
                f"is packed, and {doing} needs weights as they are: `penstock unpack` writes such a file",
            )


def _begins(index: WeightsIndex, entry: Entry, kind: int, table: bytes) -> array[int]:
    sizes = array("I", table)
    assert sizes.itemsize == 4
    if sys.byteorder == "big":
        sizes.byteswap()
    last_raw_bytes = entry.raw_bytes - (len(sizes) - 1) * BLOCK_RAW_BYTES
    for some, first, raw_bytes in ((sizes[:-1], 0, BLOCK_RAW_BYTES), (sizes[-1:], len(sizes) - 1, last_raw_bytes)):
        least_bytes, most_bytes = block_limits_bytes(kind, raw_bytes)
        # Looks at them one by one only if one is wrong: there may be a hundred thousand.
        if some and (min(some) * UNIT_BYTES < least_bytes or max(some) * UNIT_BYTES > most_bytes):
            for number, size in enumerate(some, first):
                if not least_bytes <= size * UNIT_BYTES <= most_bytes:
                    needs = f"needs {least_bytes} to {most_bytes}"
                    _fail(index, entry, f"has {size * UNIT_BYTES} bytes in block {number}, {needs}")
    return array("q", itertools.accumulate((size * UNIT_BYTES for size in sizes), initial=0))


def _fail(index: WeightsIndex, entry: Entry, fault: str) -> NoReturn:
    raise WeightsFileError(f"{index.path}: entry {printable(entry.name)!r} {fault}")
