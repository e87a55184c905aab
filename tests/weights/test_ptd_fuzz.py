"""Whatever happens to the index, reading it ends in a PenstockError or in an index that holds together."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.weight import ITEM_BYTES
from penstock.weights import WeightsIndex, read_index
from penstock.weights.format import parse_header
from penstock.weights.packing import pack
from tests.weights.packed_cases import packable
from tests.weights.ptd_cases import EVERY_KIND, STATES, TIED, Crafted, write

FUZZED = settings(max_examples=120)

# Numbers at which a signed or unsigned offset, length or product tips over.
CORNERS = (0, 1, 4, 0x7F, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFC, 0xFFFFFFFF)


class Sample:
    """A good file, and the stretches of it that reading the index looks at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = path.read_bytes()
        index = read_index(path)
        header = parse_header(path, self.content[:48], len(self.content))
        tail_bytes = len(self.content)
        if index.identity is not None:  # a packed entry has a format as well, behind it
            tail_bytes = self.content.rindex(b'{"format"', 0, self.content.rindex(b'"identity"'))
        self.places = [*range(header.flatbuffer_end_bytes), *range(tail_bytes, len(self.content))]


@pytest.fixture(scope="module", params=["ours", "ours, small", "foreign", "packed"])
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    path = tmp_path_factory.mktemp("fuzz") / "w.ptd"
    if request.param == "ours":
        write(path, [*EVERY_KIND[:15], TIED], STATES)
    elif request.param == "packed":
        pack(packable(path.with_name("plain.ptd")), path)
    else:
        crafted = Crafted()
        if request.param == "foreign":
            crafted.metadata = None
        crafted.write(path)
    return Sample(path)


def outcome(path: Path, content: bytes) -> WeightsIndex | None:
    """The index, checked, or None for a refusal that names the file. Anything else that is raised fails the test."""
    path.write_bytes(content)
    try:
        index = read_index(path)
    except PenstockError as error:
        named = str(path) in str(error)
    else:
        holds_together(index, len(content))
        return index
    assert named
    return None


def holds_together(index: WeightsIndex, file_bytes: int) -> None:
    assert index.file_bytes == file_bytes
    assert index.identity is None or isinstance(index.identity, str)
    assert len({entry.name for entry in index.entries}) == len(index.entries)
    end_bytes = 0
    for entry in sorted(index.unique_entries, key=lambda entry: (entry.offset_bytes, entry.length_bytes)):
        assert entry.offset_bytes >= end_bytes or entry.length_bytes == 0
        end_bytes = max(end_bytes, entry.offset_bytes + entry.length_bytes)
    assert end_bytes <= file_bytes
    for entry in index.entries:
        entry.name.encode()
        assert entry.kind in ("weight", "state", "blob")
        assert entry.raw_bytes == math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        assert entry.packing is not None or entry.length_bytes == entry.raw_bytes
        assert sorted(entry.dim_order) == list(range(len(entry.shape)))
        assert (entry.checksum is None) == (index.identity is None)
        first = index[entry.alias_of or entry.name]
        assert (first.offset_bytes, first.length_bytes) == (entry.offset_bytes, entry.length_bytes)
        if index.identity is not None:
            assert entry.offset_bytes % 4096 == 0


def test_the_sample_itself_is_read(sample: Sample) -> None:
    assert outcome(sample.path, sample.content) is not None


@FUZZED
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_changed_bytes(sample: Sample, flips: list[tuple[float, int]]) -> None:
    content = bytearray(sample.content)
    for fraction, mask in flips:
        content[sample.places[int(fraction * len(sample.places))]] ^= mask
    outcome(sample.path, bytes(content))


@FUZZED
@given(fraction=st.floats(0, 1, exclude_max=True), value=st.sampled_from(CORNERS), code=st.sampled_from("BHIQ"))
def test_numbers_at_their_corners(sample: Sample, fraction: float, value: int, code: str) -> None:
    width = struct.calcsize("<" + code)
    at = sample.places[int(fraction * len(sample.places))] // width * width
    content = bytearray(sample.content)
    content[at : at + width] = (value & (256**width - 1)).to_bytes(width, "little")
    outcome(sample.path, bytes(content[: len(sample.content)]))


@FUZZED
@given(fraction=st.floats(0, 1, exclude_max=True), inserted=st.binary(min_size=1, max_size=64))
@example(fraction=0.0, inserted=b"\xff")
def test_inserted_bytes(sample: Sample, fraction: float, inserted: bytes) -> None:
    at = sample.places[int(fraction * len(sample.places))]
    outcome(sample.path, sample.content[:at] + inserted + sample.content[at:])


@FUZZED
@given(fraction=st.floats(0, 1, exclude_max=True), removed=st.integers(1, 64))
def test_removed_bytes(sample: Sample, fraction: float, removed: int) -> None:
    at = sample.places[int(fraction * len(sample.places))]
    shorter = sample.content[:at] + sample.content[at + removed :]
    assert outcome(sample.path, shorter) is None
    # With its old length the file gets past the header, and the damage into the tables.
    outcome(sample.path, shorter.ljust(len(sample.content), b"\0"))


def test_every_byte_of_a_small_index_in_turn(tmp_path: Path) -> None:
    sample = Sample(Crafted().write(tmp_path / "w.ptd"))
    refusals = 0
    for at in sample.places:
        for mask in (0x01, 0x80):
            content = bytearray(sample.content)
            content[at] ^= mask
            refusals += outcome(sample.path, bytes(content)) is None
    # Some changes go unseen, such as one in the identity's text; most must not.
    assert refusals > len(sample.places)


@FUZZED
@given(content=st.binary(max_size=300))
def test_anything_at_all_behind_a_good_header(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.ptd"
    header = struct.pack("<4sIQQQQ", b"FH01", 40, 48, len(content), 56 + len(content), 0)
    outcome(path, struct.pack("<I4s", 56, b"FT01") + header + bytes(8) + content)
