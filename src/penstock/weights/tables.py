"""The FlatTensor tables as plain data, and their way into and out of a flatbuffer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import WeightsFileError
from penstock.printable import printable
from penstock.weights.flatbuffer import Buffer, Table
from penstock.weights.format import FILE_MAGIC, PADDED_HEADER_BYTES, PREFIX_BYTES, RANK_LIMIT, SCHEMA_VERSION, Header

if TYPE_CHECKING:
    import flatbuffers


@dataclass(frozen=True)
class Layout:
    """Table TensorLayout: what makes a segment a tensor."""

    scalar_type: int
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Table DataSegment. The offset counts from the segment base."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class NamedData:
    """Table NamedData: a key and the segment it names. Several keys may name one segment."""

    key: str
    segment_index: int
    layout: Layout | None


@dataclass(frozen=True)
class Tables:
    """Table FlatTensor."""

    segments: tuple[Segment, ...]
    named_data: tuple[NamedData, ...]


def decode_tables(path: Path, head: bytes) -> Tables:
    """`head` is the file from its first byte to the end of the flatbuffer."""
    root = Buffer(path, head).root()
    version = root.number(0, "version", "I")
    if version > SCHEMA_VERSION:
        raise WeightsFileError(f"{path}: has FlatTensor version {version}, needs at most {SCHEMA_VERSION}")
    segments = tuple(
        Segment(table.number(0, "offset", "Q"), table.number(1, "size", "Q")) for table in root.tables(1, "segments")
    )
    named_data: list[NamedData] = []
    seen: set[str] = set()
    # Keys are unique, so together they are shorter than the index. Strings that overlap could otherwise make
    # a small file expand to gigabytes.
    budget_bytes = len(head)
    for table in root.tables(2, "named_data"):
        key = table.text(0, "key", budget_bytes)
        budget_bytes -= len(key.encode())
        if key in seen:
            raise WeightsFileError(f"{path}: has more than one entry {printable(key)!r}, needs every name once")
        seen.add(key)
        named_data.append(NamedData(key, table.number(1, "segment_index", "I"), _decode_layout(table)))
    return Tables(segments, tuple(named_data))


def _decode_layout(named_data: Table) -> Layout | None:
    table = named_data.table(2, "tensor_layout")
    if table is None:
        return None
    return Layout(
        scalar_type=table.number(0, "scalar_type", "b"),
        sizes=table.numbers(1, "sizes", "i", RANK_LIMIT),
        dim_order=table.numbers(2, "dim_order", "B", RANK_LIMIT),
    )


def encode_tables(tables: Tables) -> bytes:
    """The flatbuffer alone, without the header in it."""
    import flatbuffers  # imports numpy, which reading does not need

    builder = flatbuffers.Builder(1024)
    # A flatbuffer is built back to front: what is pointed to comes before what points to it.
    segments = _vector(builder, [_segment(builder, segment) for segment in tables.segments])
    named_data = _vector(builder, [_named_data(builder, item) for item in tables.named_data])
    builder.StartObject(3)
    builder.PrependUint32Slot(0, SCHEMA_VERSION, 0)
    builder.PrependUOffsetTRelativeSlot(1, segments, 0)
    builder.PrependUOffsetTRelativeSlot(2, named_data, 0)
    builder.Finish(builder.EndObject(), file_identifier=FILE_MAGIC)
    return bytes(builder.Output())


def with_header(flatbuffer: bytes, header: Header) -> bytes:
    """Inserts the header behind the root offset and the identifier; only the root offset has to change."""
    (root_bytes,) = struct.unpack_from("<I", flatbuffer)
    prefix = struct.pack("<I", root_bytes + PADDED_HEADER_BYTES) + FILE_MAGIC
    return prefix + header.pack() + flatbuffer[PREFIX_BYTES:]


def _vector(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    end: int = builder.EndVector()
    return end


def _segment(builder: flatbuffers.Builder, segment: Segment) -> int:
    builder.StartObject(2)
    builder.PrependUint64Slot(0, segment.offset_bytes, 0)
    builder.PrependUint64Slot(1, segment.size_bytes, 0)
    end: int = builder.EndObject()
    return end


def _named_data(builder: flatbuffers.Builder, item: NamedData) -> int:
    layout = None if item.layout is None else _layout(builder, item.layout)
    key = builder.CreateString(item.key)
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(0, key, 0)
    builder.PrependUint32Slot(1, item.segment_index, 0)
    if layout is not None:
        builder.PrependUOffsetTRelativeSlot(2, layout, 0)
    end: int = builder.EndObject()
    return end


def _layout(builder: flatbuffers.Builder, layout: Layout) -> int:
    # A scalar's vectors are empty but present: ExecuTorch's runtime reads them without asking whether they are there.
    builder.StartVector(4, len(layout.sizes), 4)
    for size in reversed(layout.sizes):
        builder.PrependInt32(size)
    sizes = builder.EndVector()
    dim_order = builder.CreateByteVector(bytes(layout.dim_order))
    builder.StartObject(3)
    builder.PrependInt8Slot(0, layout.scalar_type, 0)
    builder.PrependUOffsetTRelativeSlot(1, sizes, 0)
    builder.PrependUOffsetTRelativeSlot(2, dim_order, 0)
    end: int = builder.EndObject()
    return end
