"""Packs the weights of a .ptd file into another one, and unpacks that to the first, byte for byte."""

from __future__ import annotations

import itertools
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import xxhash

from penstock.errors import ChecksumError, OutputExistsError, OutputPathError, WeightsFileError
from penstock.printable import printable
from penstock.regular_file import open_regular
from penstock.weight import State, Weight
from penstock.weights.block_codec import PIECE_RAW_BYTES, Slot, Workers, read_into, workers
from penstock.weights.format import aligned_bytes
from penstock.weights.index import Entry, WeightsIndex, read_index
from penstock.weights.metadata import Record, encode_metadata
from penstock.weights.packed_for import PackedFor, PlansEntry, packed_for
from penstock.weights.packed_format import (
    BLOCK_RAW_BYTES,
    HEADER,
    KINDS,
    MAGIC,
    UNIT_BYTES,
    VERSIONS,
    Packing,
    block_count,
    layout_checksum,
    table_end_bytes,
)
from penstock.weights.packed_reader import Blocks
from penstock.weights.partial import PartialFile, partial_file
from penstock.weights.raw_chunks import chunks_by
from penstock.weights.tables import Segment
from penstock.weights.writer import FilePlan, encode_index, plan_file, write_ptd

# In percent of the raw size. What stays above this is not worth unpacking.
_MOST_PERCENT = 95

# Read at a time for a checksum: little enough to still be in the CPU's nearer cache.
_CHECKSUM_BYTES = 256 << 10

OnBytes = Callable[[int], None]


def pack(
    source_path: str | os.PathLike[str],
    target_path: str | os.PathLike[str],
    *,
    program: str | os.PathLike[str] | None = None,
    on_bytes: OnBytes | None = None,
    overwrite: bool = False,
) -> WeightsIndex:
    """Writes a .ptd with the weights of another one packed: the same values to the bit, in fewer bytes.

    program    the .pt2 or .pte of the weights. What it gathers rows from stays as it is, to be read in place. For a
               .pte, so does what no delegate of ours reads, and plans for what is packed are written too, for
               processes without Python
    on_bytes   is told again and again how many more bytes of the source are done
    overwrite  replace an existing file

    Floating-point weights of 8, 16 and 32 bits and at least 64 KiB are packed where that saves a twentieth. All else
    stays as it is.
    """
    source, target = read_index(source_path), _target(target_path, overwrite)
    asked = PackedFor() if program is None else packed_for(Path(program), source)
    return pack_entries(source, target, asked, on_bytes)


def pack_entries(source: WeightsIndex, target: Path, asked: PackedFor, on_bytes: OnBytes | None = None) -> WeightsIndex:
    """An older file is replaced."""
    for entry in source.unique_entries:
        if entry.packing is not None:
            raise WeightsFileError(
                f"{source.path}: entry {printable(entry.name)!r} is packed already; give the unpacked file"
            )
    with open_regular(source.path, WeightsFileError) as file, workers() as held:
        plan = _source_plan(source, file.fileno())
        # The target needs less than the source. Reserving the source's size would refuse disks that have enough room,
        # and take time where files are memory.
        with partial_file(target, source.file_bytes, reserved=False) as partial:
            _Packer(source, file.fileno(), partial, plan, held, on_bytes or _nobody, asked).write()
            written = read_index(partial.partial)
    return replace(written, path=target)


def unpack(
    source_path: str | os.PathLike[str],
    target_path: str | os.PathLike[str],
    *,
    on_bytes: OnBytes | None = None,
    overwrite: bool = False,
) -> WeightsIndex:
    """Writes the .ptd that a packed one was made from, byte for byte.

    on_bytes   is told again and again how many more bytes were written
    overwrite  replace an existing file
    """
    source, target = read_index(source_path), _target(target_path, overwrite)
    if source.identity is None or not any(entry.packing for entry in source.entries):
        raise WeightsFileError(f"{source.path} has no packed entry, so there is nothing to unpack")
    sources = _sources(source)
    weights = [item for item in sources if isinstance(item, Weight)]
    states = [item for item in sources if isinstance(item, State)]
    with open_regular(source.path, WeightsFileError) as file, workers() as held:

        def chunks_of(item: Weight | State) -> Iterator[memoryview]:
            entry = source[item.name]
            digest = xxhash.xxh3_64()
            for chunk in chunks_by(held, source, entry, file.fileno()):
                digest.update(chunk)
                yield chunk
            _check(source, entry, digest.intdigest())

        return write_ptd(target, weights, chunks_of, states=states, identity=source.identity, on_bytes=on_bytes)


@dataclass(frozen=True)
class _Packer:
    source: WeightsIndex
    fd: int
    target: PartialFile
    plan: FilePlan
    held: Workers
    on_bytes: OnBytes
    asked: PackedFor

    def write(self) -> None:
        records: list[Record] = []
        segments: list[Segment] = []
        checksums: list[Future[int] | None] = []
        blocks: dict[str, Blocks] = {}
        end_bytes = 0
        for record, entry in zip(self.plan.records, self.source.unique_entries, strict=True):
            offset_bytes = self.base_bytes + end_bytes
            packed = self._pack(entry, offset_bytes) if self._may_pack(record) else None
            if packed is None:
                self._copy(entry, offset_bytes)
                size_bytes, checksum = entry.length_bytes, None
            else:
                blocks[entry.name] = packed
                size_bytes = packed.data_offset_bytes + packed.begins_bytes[-1]
                # The table comes first but was known last. So the bytes are read again, while others are packed.
                checksum = self.held.pool.submit(_checksum, self.target.fd, offset_bytes, size_bytes)
            records.append(replace(record, checksum=entry.checksum or 0))
            checksums.append(checksum)
            segments.append(Segment(end_bytes, size_bytes))
            end_bytes = aligned_bytes(end_bytes + size_bytes)
        records = [
            record if found is None else replace(record, packing=Packing(KINDS[record.dtype], found.result()))
            for record, found in zip(records, checksums, strict=True)
        ]
        if self.asked.plans is not None and blocks:
            content = self.asked.plans.content(blocks)
            self.target.write(self.base_bytes + end_bytes, content)
            records.append(_plans_record(self.asked.plans, content))
            segments.append(Segment(end_bytes, len(content)))
            end_bytes = aligned_bytes(end_bytes + len(content))
        self._finish(records, segments, end_bytes)

    @cached_property
    def base_bytes(self) -> int:
        """The same as without packing. The entry with plans may need more room for the index."""
        if self.asked.plans is None:
            return self.plan.base_bytes
        # The longest that the index can be: it loses the layout of whatever is packed. All nonzero numbers take the
        # same room.
        records = [*self.plan.records, _plans_record(self.asked.plans, b"")]
        room = encode_index(records, [*self.plan.segments[:-1], Segment(1, 1), Segment(1, 1)], 0)
        return max(self.plan.base_bytes, aligned_bytes(len(room)))

    def _finish(self, records: list[Record], segments: list[Segment], end_bytes: int) -> None:
        """Writes the metadata behind everything, and the tables in the room that was left before it."""
        identity = self.source.identity or ""
        metadata_bytes = len(encode_metadata(identity, records, b""))
        head = encode_index(records, [*segments, Segment(end_bytes, metadata_bytes)], self.base_bytes)
        assert len(head) <= self.base_bytes
        self.target.write(0, head)
        self.target.write(self.base_bytes + end_bytes, encode_metadata(identity, records, head))
        self.target.shorten(self.base_bytes + end_bytes + metadata_bytes)

    def _may_pack(self, record: Record) -> bool:
        entry = self.source[record.name]
        large = entry.raw_bytes >= BLOCK_RAW_BYTES
        return record.kind == "weight" and record.dtype in KINDS and large and not self.asked.left & {*record.names}

    def _pack(self, entry: Entry, offset_bytes: int) -> Blocks | None:
        """Writes the entry packed; None if that would save too little. Places of blocks are relative to the entry."""
        kind, what = KINDS[entry.dtype], f"{self.source.path}: entry {printable(entry.name)!r}"
        most_bytes = entry.raw_bytes * _MOST_PERCENT // 100
        count = block_count(entry.raw_bytes)
        sizes = array("q")
        digest = xxhash.xxh3_64()
        end_bytes = table_end_bytes(count)

        def packed(slot: Slot, begin_bytes: int) -> tuple[int, array[int]]:
            raw_bytes = min(PIECE_RAW_BYTES, entry.raw_bytes - begin_bytes)
            read_into(self.fd, slot.raw[:raw_bytes], entry.offset_bytes + begin_bytes, what)
            return raw_bytes, slot.pack(kind, raw_bytes)

        done_bytes = 0
        pieces = self.held.in_order(packed, range(0, entry.raw_bytes, PIECE_RAW_BYTES))
        for slot, (raw_bytes, piece_sizes) in pieces:
            packed_bytes = sum(piece_sizes)
            if end_bytes + packed_bytes > most_bytes:
                pieces.close()  # type: ignore[attr-defined]
                self.on_bytes(-done_bytes)
                return None
            digest.update(slot.raw[:raw_bytes])
            self.target.write(offset_bytes + end_bytes, slot.packed[:packed_bytes])
            end_bytes += packed_bytes
            sizes.extend(piece_sizes)
            done_bytes += raw_bytes
            self.on_bytes(raw_bytes)
        _check(self.source, entry, digest.intdigest())
        layout = layout_checksum(entry.dtype, entry.shape, entry.dim_order)
        header = HEADER.pack(MAGIC, VERSIONS[kind], kind, entry.raw_bytes, BLOCK_RAW_BYTES, count, layout)
        table = struct.pack(f"<{count}I", *(size // UNIT_BYTES for size in sizes))
        self.target.write(offset_bytes, (header + table).ljust(table_end_bytes(count), b"\0"))
        begins_bytes = array("q", itertools.accumulate(sizes, initial=0))
        return Blocks(kind, entry.raw_bytes, table_end_bytes(count), begins_bytes)

    def _copy(self, entry: Entry, offset_bytes: int) -> None:
        digest = xxhash.xxh3_64()
        end_bytes = offset_bytes
        for chunk in chunks_by(self.held, self.source, entry, self.fd):
            digest.update(chunk)
            self.target.write(end_bytes, chunk)
            end_bytes += len(chunk)
            self.on_bytes(len(chunk))
        _check(self.source, entry, digest.intdigest())
        # Overwrites what packing left behind the entry before it was given up.
        zeros_bytes = aligned_bytes(end_bytes) - end_bytes
        self.target.write(end_bytes, bytes(zeros_bytes))


def _plans_record(plans: PlansEntry, content: bytes) -> Record:
    return Record(plans.name, (), "uint8", (len(content),), (0,), "plans", xxhash.xxh3_64_intdigest(content))


def _checksum(fd: int, offset_bytes: int, count_bytes: int) -> int:
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(count_bytes, _CHECKSUM_BYTES)))
    for begin_bytes in range(0, count_bytes, len(buffer)):
        piece = buffer[: count_bytes - begin_bytes]
        read_into(fd, piece, offset_bytes + begin_bytes, "what was just written")
        digest.update(piece)
    return digest.intdigest()


def _check(index: WeightsIndex, entry: Entry, checksum: int) -> None:
    if checksum != entry.checksum:
        raise ChecksumError(
            f"{index.path}: entry {printable(entry.name)!r} is damaged: it has checksum {checksum:016x},"
            f" needs {entry.checksum:016x}"
        )


def _sources(index: WeightsIndex) -> list[Weight | State]:
    """The weights and states that a writer of the file without packing gets."""
    aliases: dict[str, list[str]] = {}
    for entry in index.entries:
        if entry.alias_of is not None:
            aliases.setdefault(entry.alias_of, []).append(entry.name)
    return [
        State(entry.name, entry.dtype, entry.shape, entry.dim_order, "stored")
        if entry.kind == "state"
        else Weight(entry.name, entry.dtype, entry.shape, entry.dim_order, tuple(aliases.get(entry.name, ())))
        for entry in index.unique_entries
        if entry.kind != "plans"
    ]


def _source_plan(index: WeightsIndex, fd: int) -> FilePlan:
    """Refuses a file that unpack() could not give back: one that another writer made."""
    if index.identity is None:
        raise WeightsFileError(f"{index.path} was written by ExecuTorch: it has no checksums, and cannot be packed")
    plan = plan_file(index.path, _sources(index), index.identity)
    records = [replace(r, checksum=e.checksum or 0) for r, e in zip(plan.records, index.unique_entries, strict=True)]
    metadata = encode_metadata(index.identity, records, plan.index)
    metadata_offset_bytes = plan.base_bytes + plan.segments[-1].offset_bytes
    same = plan.total_bytes == index.file_bytes and all(
        os.pread(fd, len(content), offset_bytes) == content
        for content, offset_bytes in ((plan.index, 0), (metadata, metadata_offset_bytes))
    )
    if not same:
        raise WeightsFileError(
            f"{index.path} was not written by this Penstock's writer, so unpacking could not give it back byte for"
            " byte: penstock.compile again"
        )
    return plan


def _target(path: str | os.PathLike[str], overwrite: bool) -> Path:
    target = Path(path)
    if not target.parent.is_dir():
        raise OutputPathError(f"{target} cannot be written: the folder {target.parent} does not exist")
    if target.is_dir():
        raise OutputPathError(f"{target} cannot be written: it is a folder")
    if target.exists() and not overwrite:
        raise OutputExistsError(f"{target} exists; pass overwrite=True to replace")
    return target


def _nobody(count_bytes: int) -> None:
    pass
