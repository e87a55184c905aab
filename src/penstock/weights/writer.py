"""Writing a .ptd file: the index first, then every weight's bytes as they come, chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from penstock.errors import WeightsFileError
from penstock.weight import State, Weight
from penstock.weights.agreement import expected_layout
from penstock.weights.format import (
    INDEX_LIMIT_BYTES,
    METADATA_KEY,
    PADDED_HEADER_BYTES,
    Header,
    aligned_bytes,
    layout_fault,
)
from penstock.weights.index import WeightsIndex, read_index
from penstock.weights.metadata import Record, encode_metadata
from penstock.weights.partial import PartialFile, partial_file
from penstock.weights.tables import NamedData, Segment, Tables, encode_tables, with_header

Chunk = bytes | bytearray | memoryview


def write_ptd(
    path: str | os.PathLike[str],
    weights: Sequence[Weight],
    chunks_of: Callable[[Weight | State], Iterable[Chunk]],
    *,
    states: Sequence[State] = (),
    identity: str,
    on_bytes: Callable[[int], None] | None = None,
) -> WeightsIndex:
    """Writes the weights in the order given, then the states whose first value is stored. An older file is replaced.

    `chunks_of` gives the bytes of a weight or a state, already permuted by its dim order; one chunk is held at a time.
    `on_bytes` is told the length of every chunk that was written. The file appears under `path` only when complete.
    """
    path = Path(path)
    plan = plan_file(path, [*weights, *(state for state in states if state.init == "stored")], identity)
    with partial_file(path, plan.total_bytes) as file:
        file.write(0, plan.index)
        records: list[Record] = []
        for source, record, segment in zip(plan.sources, plan.records, plan.segments, strict=False):
            offset_bytes = plan.base_bytes + segment.offset_bytes
            checksum = _write_chunks(file, source, offset_bytes, chunks_of(source), on_bytes)
            records.append(replace(record, checksum=checksum))
        file.write(plan.base_bytes + plan.segments[-1].offset_bytes, encode_metadata(identity, records, plan.index))
        index = read_index(file.partial)
    return replace(index, path=path)


@dataclass(frozen=True)
class FilePlan:
    """Everything about the file but the data and the checksums."""

    sources: tuple[Weight | State, ...]
    records: tuple[Record, ...]
    # One per source, and one for the metadata.
    segments: tuple[Segment, ...]
    index: bytes
    base_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.base_bytes + self.segments[-1].offset_bytes + self.segments[-1].size_bytes


def plan_file(path: Path, sources: Sequence[Weight | State], identity: str) -> FilePlan:
    """Where everything lies in a file without packed entries."""
    records = tuple(_record(source) for source in sources)
    _check(path, records, identity)
    sizes_bytes = [*(source.nbytes for source in sources), len(encode_metadata(identity, records, b""))]
    segments = tuple(_segments(sizes_bytes))
    flatbuffer = encode_tables(Tables(segments, tuple(_named_data(records))))
    base_bytes = aligned_bytes(PADDED_HEADER_BYTES + len(flatbuffer))
    if max(base_bytes, sizes_bytes[-1]) > INDEX_LIMIT_BYTES:
        raise WeightsFileError(
            f"{path}: the index of {len(records)} entries has {max(base_bytes, sizes_bytes[-1])} bytes,"
            f" needs to stay within {INDEX_LIMIT_BYTES}"
        )
    return FilePlan(tuple(sources), records, segments, _with_header(flatbuffer, base_bytes, segments), base_bytes)


def encode_index(records: Sequence[Record], segments: Sequence[Segment], base_bytes: int) -> bytes:
    """Header and tables for segments that are known already: one per record, and one for the metadata."""
    return _with_header(encode_tables(Tables(tuple(segments), tuple(_named_data(records)))), base_bytes, segments)


def _with_header(flatbuffer: bytes, base_bytes: int, segments: Sequence[Segment]) -> bytes:
    header = Header(
        flatbuffer_offset_bytes=PADDED_HEADER_BYTES,
        flatbuffer_size_bytes=len(flatbuffer),
        segment_base_bytes=base_bytes,
        segment_data_bytes=segments[-1].offset_bytes + segments[-1].size_bytes,
    )
    return with_header(flatbuffer, header)


def _record(source: Weight | State) -> Record:
    return Record(
        name=source.name,
        aliases=source.aliases if isinstance(source, Weight) else (),
        dtype=source.dtype,
        shape=tuple(source.shape),
        dim_order=tuple(source.dim_order),
        kind="weight" if isinstance(source, Weight) else "state",
        checksum=0,
    )


def _segments(sizes_bytes: Sequence[int]) -> Iterator[Segment]:
    """An empty segment takes no room: it starts where the next one does, which both readers accept."""
    offset_bytes = 0
    for size_bytes in sizes_bytes:
        yield Segment(offset_bytes, size_bytes)
        offset_bytes = aligned_bytes(offset_bytes + size_bytes)


def _named_data(records: Sequence[Record]) -> Iterator[NamedData]:
    for segment_index, record in enumerate(records):
        layout = None if record.packing else expected_layout(record.dtype, record.shape, record.dim_order)
        for name in record.names:
            yield NamedData(name, segment_index, layout)
    yield NamedData(METADATA_KEY, len(records), None)


def _check(path: Path, records: Sequence[Record], identity: str) -> None:
    if not isinstance(identity, str) or not _is_utf8(identity):
        raise WeightsFileError(f"{path}: has identity {identity!r}, needs a string that UTF-8 can hold")
    taken = {METADATA_KEY}
    for record in records:
        fault = layout_fault(record.dtype, record.shape, record.dim_order)
        if fault is not None:
            raise WeightsFileError(f"{path}: {record.kind} {record.name!r} {fault}")
        for name in record.names:
            # ExecuTorch compares keys as C strings: what follows a NUL would not count.
            if "\0" in name or not _is_utf8(name):
                raise WeightsFileError(f"{path}: {record.kind} {name!r} needs a name of UTF-8 without NUL")
            if name in taken:
                reason = "is the name of the file's own metadata" if name == METADATA_KEY else "is there already"
                raise WeightsFileError(f"{path}: {record.kind} {name!r} {reason}, needs a name of its own")
            taken.add(name)


def _is_utf8(text: str) -> bool:
    return text == text.encode(errors="replace").decode()


def _write_chunks(
    file: PartialFile,
    source: Weight | State,
    offset_bytes: int,
    chunks: Iterable[Chunk],
    on_bytes: Callable[[int], None] | None,
) -> int:
    """Writes one weight and returns its checksum."""
    digest = xxhash.xxh3_64()
    written_bytes = 0
    for chunk in chunks:
        view = memoryview(chunk)
        count_bytes = view.nbytes
        if written_bytes + count_bytes > source.nbytes:
            raise WeightsFileError(
                f"{file.path}: {source.name!r} has at least {written_bytes + count_bytes} bytes in its chunks,"
                f" needs {source.nbytes}"
            )
        # An empty view cannot be cast.
        if count_bytes:
            view = view.cast("B")
            digest.update(view)
            file.write(offset_bytes + written_bytes, view)
            written_bytes += count_bytes
            if on_bytes is not None:
                on_bytes(count_bytes)
        # Released before the next chunk is made: otherwise two of them would exist at once.
        del chunk, view
    if written_bytes != source.nbytes:
        raise WeightsFileError(
            f"{file.path}: {source.name!r} has {written_bytes} bytes in its chunks, needs {source.nbytes}"
        )
    return digest.intdigest()
