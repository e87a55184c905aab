"""The index of a .ptd file: which entries it has and where their bytes lie. Reading it never touches the data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.errors import WeightsFileError
from penstock.printable import printable
from penstock.regular_file import open_regular
from penstock.weight import ITEM_BYTES
from penstock.weights.agreement import check_agreement, check_segments, check_tensor
from penstock.weights.format import DTYPES, HEAD_BYTES, INDEX_LIMIT_BYTES, METADATA_KEY, Header, parse_header
from penstock.weights.metadata import Metadata, decode_metadata
from penstock.weights.packed_format import Packing
from penstock.weights.tables import Tables, decode_tables


@dataclass(frozen=True)
class Entry:
    """One name in the file. The offset counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    # "weight" or "state"; "blob" is an entry without a tensor layout in a file that ExecuTorch wrote.
    kind: str
    offset_bytes: int
    # As stored: fewer than the tensor's if the entry is packed.
    length_bytes: int
    # xxh3_64 of the tensor's bytes; None in a file that ExecuTorch wrote.
    checksum: int | None
    # The first name of the same bytes, if this is a further one.
    alias_of: str | None = None
    packing: Packing | None = None

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensor, whether the file holds it packed or not."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightsIndex:
    path: Path
    file_bytes: int
    # The layout identity of the program the file was written for; None in a file that ExecuTorch wrote.
    identity: str | None
    # Every name, aliases included, in the order of the file's table.
    entries: tuple[Entry, ...]

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def unique_entries(self) -> tuple[Entry, ...]:
        """Each set of bytes once, under its first name."""
        return tuple(entry for entry in self.entries if entry.alias_of is None)

    def __getitem__(self, name: str) -> Entry:
        if name not in self._by_name:
            raise WeightsFileError(f"{self.path}: has no entry {printable(name)!r} among its {len(self.entries)}")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


def read_index(path: str | os.PathLike[str]) -> WeightsIndex:
    """Reads and checks the header, the tables and our metadata; files that ExecuTorch wrote have no metadata."""
    with open_regular(path, WeightsFileError) as file:
        return _read_index(Path(path), file.fileno())


def _read_index(path: Path, fd: int) -> WeightsIndex:
    file_bytes = os.fstat(fd).st_size
    header = parse_header(path, _read(path, fd, 0, min(file_bytes, HEAD_BYTES)), file_bytes)
    head = _read(path, fd, 0, header.flatbuffer_end_bytes)
    tables = decode_tables(path, head)
    check_segments(path, header, tables)
    metadata = _read_metadata(path, fd, header, tables, head)
    if metadata is None:
        return WeightsIndex(path, file_bytes, None, tuple(_foreign_entries(path, header, tables)))
    check_agreement(path, header, tables, metadata, file_bytes)
    return WeightsIndex(path, file_bytes, metadata.identity, tuple(_own_entries(header, tables, metadata)))


def _read_metadata(path: Path, fd: int, header: Header, tables: Tables, head: bytes) -> Metadata | None:
    for item in tables.named_data:
        if item.key == METADATA_KEY:
            segment = tables.segments[item.segment_index]
            if segment.size_bytes > INDEX_LIMIT_BYTES:
                raise WeightsFileError(
                    f"{path}: entry {METADATA_KEY!r} has {segment.size_bytes} bytes,"
                    f" needs to stay within {INDEX_LIMIT_BYTES}"
                )
            raw = _read(path, fd, header.segment_base_bytes + segment.offset_bytes, segment.size_bytes)
            return decode_metadata(path, raw, head)
    return None


def _own_entries(header: Header, tables: Tables, metadata: Metadata) -> Iterator[Entry]:
    segment_of = {item.key: tables.segments[item.segment_index] for item in tables.named_data}
    for record in metadata.records:
        for name in record.names:
            yield Entry(
                name=name,
                dtype=record.dtype,
                shape=record.shape,
                dim_order=record.dim_order,
                kind=record.kind,
                offset_bytes=header.segment_base_bytes + segment_of[name].offset_bytes,
                length_bytes=segment_of[name].size_bytes,
                checksum=record.checksum,
                alias_of=None if name == record.name else record.name,
                packing=record.packing,
            )


def _foreign_entries(path: Path, header: Header, tables: Tables) -> Iterator[Entry]:
    """ExecuTorch gives equal bytes one segment, so names that share one may differ in shape and even in dtype."""
    first_names: dict[int, str] = {}
    for item in tables.named_data:
        segment = tables.segments[item.segment_index]
        first_name = first_names.setdefault(item.segment_index, item.key)
        dtype: str
        shape: tuple[int, ...]
        dim_order: tuple[int, ...]
        if item.layout is None:
            dtype, shape, dim_order = "uint8", (segment.size_bytes,), (0,)
        elif item.layout.scalar_type in DTYPES:
            dtype, shape, dim_order = DTYPES[item.layout.scalar_type], item.layout.sizes, item.layout.dim_order
            check_tensor(path, item.key, dtype, shape, dim_order, segment.size_bytes)
        else:
            raise WeightsFileError(
                f"{path}: entry {printable(item.key)!r} has scalar type {item.layout.scalar_type},"
                f" needs one of {', '.join(map(str, sorted(DTYPES)))}"
            )
        yield Entry(
            name=item.key,
            dtype=dtype,
            shape=shape,
            dim_order=dim_order,
            kind="blob" if item.layout is None else "weight",
            offset_bytes=header.segment_base_bytes + segment.offset_bytes,
            length_bytes=segment.size_bytes,
            checksum=None,
            alias_of=None if first_name == item.key else first_name,
        )


def _read(path: Path, fd: int, offset_bytes: int, count_bytes: int) -> bytes:
    parts: list[bytes] = []
    missing_bytes = count_bytes
    while missing_bytes:
        part = os.pread(fd, missing_bytes, offset_bytes + count_bytes - missing_bytes)
        if not part:
            raise WeightsFileError(
                f"{path}: truncated while it was read: has {offset_bytes + count_bytes - missing_bytes} bytes,"
                f" needs {offset_bytes + count_bytes}"
            )
        parts.append(part)
        missing_bytes -= len(part)
    return b"".join(parts)
