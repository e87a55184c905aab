"""The bytes of an entry's tensor, whether the entry is packed or not, a piece at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from penstock.errors import WeightsFileError
from penstock.printable import printable
from penstock.regular_file import open_regular
from penstock.weights.block_codec import PIECE_BLOCKS, PIECE_RAW_BYTES, Slot, Workers, read_into, workers
from penstock.weights.index import Entry, WeightsIndex
from penstock.weights.packed_format import BLOCK_RAW_BYTES
from penstock.weights.packed_reader import blocks_of

OnStored = Callable[[memoryview], None]


def raw_chunks(index: WeightsIndex, entry: Entry) -> Iterator[memoryview]:
    """Each chunk is good until the next is asked for."""
    with open_regular(index.path, WeightsFileError) as file, workers() as held:
        yield from chunks_by(held, index, entry, file.fileno())


def raw_content(index: WeightsIndex, entry: Entry) -> bytearray:
    """All of it at once."""
    content = bytearray()
    for chunk in raw_chunks(index, entry):
        content += chunk
    return content


def chunks_by(
    held: Workers, index: WeightsIndex, entry: Entry, fd: int, on_stored: OnStored | None = None
) -> Iterator[memoryview]:
    """raw_chunks() on an open file. `on_stored` is shown every stored byte of the entry, in order."""
    what = f"{index.path}: entry {printable(entry.name)!r}"
    if entry.packing is None:
        for begin_bytes in range(0, entry.length_bytes, PIECE_RAW_BYTES):
            chunk = held.slots[0].raw[: entry.length_bytes - begin_bytes]
            read_into(fd, chunk, entry.offset_bytes + begin_bytes, what)
            if on_stored is not None:
                on_stored(chunk)
            yield chunk
        return
    blocks = blocks_of(index, entry, fd)
    if on_stored is not None:
        on_stored(memoryview(os.pread(fd, blocks.data_offset_bytes - entry.offset_bytes, entry.offset_bytes)))

    def unpacked(slot: Slot, first: int) -> tuple[int, int]:
        begins = blocks.begins_bytes[first : first + PIECE_BLOCKS + 1]
        packed_bytes = begins[-1] - begins[0]
        raw_bytes = min(PIECE_RAW_BYTES, blocks.raw_bytes - first * BLOCK_RAW_BYTES)
        read_into(fd, slot.packed[:packed_bytes], blocks.data_offset_bytes + begins[0], what)
        sizes = begins[1:]
        for number in range(len(sizes)):
            sizes[number] -= begins[number]
        slot.unpack(blocks.kind, sizes, raw_bytes)
        return packed_bytes, raw_bytes

    for slot, (packed_bytes, raw_bytes) in held.in_order(
        unpacked, range(0, len(blocks.begins_bytes) - 1, PIECE_BLOCKS)
    ):
        if on_stored is not None:
            on_stored(slot.packed[:packed_bytes])
        yield slot.raw[:raw_bytes]
