"""Whether the parts of a .ptd file agree: header, tables, metadata. Each check refuses by name, with both numbers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from penstock.errors import WeightsFileError
from penstock.printable import printable
from penstock.weight import ITEM_BYTES
from penstock.weights.format import METADATA_KEY, PAGE_BYTES, SCALAR_TYPES, Header, layout_fault
from penstock.weights.metadata import Metadata, Record
from penstock.weights.packed_format import UNIT_BYTES, Packing, entry_limits_bytes
from penstock.weights.tables import Layout, NamedData, Tables


def expected_layout(dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...]) -> Layout | None:
    """The tensor layout that a file of ours holds for this tensor; None if the schema has no such dtype."""
    return Layout(SCALAR_TYPES[dtype], shape, dim_order) if dtype in SCALAR_TYPES else None


def check_segments(path: Path, header: Header, tables: Tables) -> None:
    """Every key names a segment, every segment lies in the file, and no two share a byte."""
    labels = {index: f"segment {index}" for index in range(len(tables.segments))}
    for item in reversed(tables.named_data):
        if item.segment_index not in labels:
            raise WeightsFileError(
                f"{path}: entry {printable(item.key)!r} has segment number {item.segment_index},"
                f" the file has {len(tables.segments)} segments"
            )
        labels[item.segment_index] = f"entry {printable(item.key)!r}"
    for index, segment in enumerate(tables.segments):
        end_bytes = segment.offset_bytes + segment.size_bytes
        if end_bytes > header.segment_data_bytes:
            raise WeightsFileError(
                f"{path}: {labels[index]} is out of range: needs segment data up to byte {end_bytes},"
                f" the file has {header.segment_data_bytes}"
            )
    # Empty segments share no byte wherever they lie. Of the others, it is enough to compare neighbours in this order.
    filled = sorted((s.offset_bytes, s.size_bytes, i) for i, s in enumerate(tables.segments) if s.size_bytes)
    for (offset_bytes, size_bytes, index), (next_offset_bytes, _, next_index) in itertools.pairwise(filled):
        if offset_bytes + size_bytes > next_offset_bytes:
            raise WeightsFileError(
                f"{path}: {labels[index]} and {labels[next_index]} overlap: the second has segment data offset"
                f" {next_offset_bytes}, needs at least {offset_bytes + size_bytes}"
            )


def check_tensor(
    path: Path, name: str, dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...], length_bytes: int
) -> None:
    fault = layout_fault(dtype, shape, dim_order)
    if fault is not None:
        raise WeightsFileError(f"{path}: entry {printable(name)!r} {fault}")
    needed_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if length_bytes != needed_bytes:
        raise WeightsFileError(
            f"{path}: entry {printable(name)!r} has {length_bytes} bytes, {dtype} of shape {list(shape)} needs"
            f" {needed_bytes}"
        )


def check_packed(path: Path, record: Record, packing: Packing, length_bytes: int) -> None:
    fault = layout_fault(record.dtype, record.shape, record.dim_order)
    if fault is not None:
        raise WeightsFileError(f"{path}: entry {printable(record.name)!r} {fault}")
    raw_bytes = math.prod(record.shape) * ITEM_BYTES[record.dtype]
    if not raw_bytes:
        raise WeightsFileError(f"{path}: entry {printable(record.name)!r} is packed, and has nothing to be packed")
    least_bytes, most_bytes = entry_limits_bytes(packing.kind, raw_bytes)
    if not least_bytes <= length_bytes <= most_bytes or length_bytes % UNIT_BYTES:
        raise WeightsFileError(
            f"{path}: entry {printable(record.name)!r} has {length_bytes} bytes, packed {record.dtype} of shape"
            f" {list(record.shape)} needs {least_bytes} to {most_bytes}, a multiple of {UNIT_BYTES}"
        )


def check_agreement(path: Path, header: Header, tables: Tables, metadata: Metadata, file_bytes: int) -> None:
    """What a file of ours promises on top: it ends where it says, is aligned, and its metadata fits its tables."""
    if header.end_bytes != file_bytes:
        raise WeightsFileError(f"{path}: has {file_bytes} bytes, the header needs {header.end_bytes}")
    items = {item.key: item for item in tables.named_data}
    for item in tables.named_data:
        offset_bytes = header.segment_base_bytes + tables.segments[item.segment_index].offset_bytes
        if offset_bytes % PAGE_BYTES:
            raise WeightsFileError(
                f"{path}: entry {printable(item.key)!r} is misaligned: has offset {offset_bytes},"
                f" needs a multiple of {PAGE_BYTES}"
            )
    owners = {items.pop(METADATA_KEY).segment_index: METADATA_KEY}
    for record in metadata.records:
        _check_record(path, record, items, tables, owners)
    for name in items:
        raise WeightsFileError(f"{path}: entry {printable(name)!r} has no record in {METADATA_KEY}, needs one")


def _check_record(
    path: Path, record: Record, items: dict[str, NamedData], tables: Tables, owners: dict[int, str]
) -> None:
    """Takes the record's names out of `items`, and enters it as the owner of its segment."""
    segment_index: int | None = None
    # A packed entry has none: other readers take it for bytes, not for a tensor.
    layout = None if record.packing else expected_layout(record.dtype, record.shape, record.dim_order)
    for name in record.names:
        item = items.pop(name, None)
        if item is None:
            raise WeightsFileError(
                f"{path}: {METADATA_KEY} has {printable(name)!r}, needs names that the table has, each once"
            )
        if segment_index is None:
            segment_index = item.segment_index
            owner = owners.setdefault(segment_index, name)
            if owner != name:
                raise WeightsFileError(
                    f"{path}: entry {printable(name)!r} has segment number {segment_index}, which is that of"
                    f" {printable(owner)!r}; {METADATA_KEY} needs them apart"
                )
            length_bytes = tables.segments[segment_index].size_bytes
            if record.packing is None:
                check_tensor(path, name, record.dtype, record.shape, record.dim_order, length_bytes)
            else:
                check_packed(path, record, record.packing, length_bytes)
        if item.segment_index != segment_index:
            raise WeightsFileError(
                f"{path}: entry {printable(name)!r} has segment number {item.segment_index},"
                f" {METADATA_KEY} needs {segment_index}, that of {printable(record.name)!r}"
            )
        if item.layout != layout:
            raise WeightsFileError(
                f"{path}: entry {printable(name)!r} has {item.layout}, {METADATA_KEY} needs {layout}"
            )
