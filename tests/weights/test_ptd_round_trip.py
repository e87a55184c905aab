"""What is written is what is read, and it lies where the index says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from penstock.errors import WeightsFileError
from penstock.weight import State, Weight
from penstock.weights import read_index, write_ptd
from penstock.weights.format import PAGE_BYTES, parse_header
from tests.weights.ptd_cases import EVERY_KIND, STATES, TIED, chunks_of, payload, write


def test_every_dtype_and_dim_order_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"
    written = write(path, [*EVERY_KIND, TIED], STATES)
    index = read_index(path)
    data = path.read_bytes()

    assert index == written
    assert index.file_bytes == len(data)
    sources: list[Weight | State] = [*EVERY_KIND, TIED, STATES[0]]
    for source in sources:
        entry = index[source.name]
        assert (entry.dtype, entry.shape, entry.dim_order) == (source.dtype, source.shape, source.dim_order)
        assert entry.length_bytes == source.nbytes
        assert data[entry.offset_bytes : entry.offset_bytes + entry.length_bytes] == payload(source)
        assert entry.checksum == xxhash.xxh3_64_intdigest(payload(source))
        assert entry.offset_bytes % PAGE_BYTES == 0
        assert entry.alias_of is None


def test_entries_lie_in_the_order_given(tmp_path: Path) -> None:
    weights = [Weight(name, "uint8", (5000,), (0,)) for name in ("z", "a", "m")]
    index = write(tmp_path / "model.ptd", weights, STATES)
    assert [entry.name for entry in index.entries] == ["z", "a", "m", "cache.positions"]
    offsets = [entry.offset_bytes for entry in index.entries]
    assert offsets == [offsets[0] + number * 8192 for number in range(4)]


def test_only_stored_states_have_an_entry(tmp_path: Path) -> None:
    index = write(tmp_path / "model.ptd", [TIED], STATES)
    assert index["cache.positions"].kind == "state"
    assert index[TIED.name].kind == "weight"
    assert "cache.keys" not in index


def test_tied_names_share_one_set_of_bytes(tmp_path: Path) -> None:
    index = write(tmp_path / "model.ptd", [TIED, Weight("other", "int8", (9,), (0,))])
    entries = [index[name] for name in TIED.names]
    assert len({(entry.offset_bytes, entry.length_bytes, entry.checksum) for entry in entries}) == 1
    assert [entry.alias_of for entry in entries] == [None, TIED.name, TIED.name]
    assert [entry.name for entry in index.unique_entries] == [TIED.name, "other"]
    assert len(index.entries) == 4
    # The bytes are there once: two pages for the weight, one for the other, then the metadata.
    assert index["other"].offset_bytes - index[TIED.name].offset_bytes == 8192


def test_empty_weights_stay_distinct(tmp_path: Path) -> None:
    weights = [Weight(name, "float32", (0, 3), (0, 1)) for name in ("one", "two")]
    index = write(tmp_path / "model.ptd", [*weights, Weight("three", "int8", (1,), (0,))])
    assert [entry.name for entry in index.unique_entries] == ["one", "two", "three"]
    assert [entry.length_bytes for entry in index.entries] == [0, 0, 1]


def test_a_file_may_hold_no_weight_at_all(tmp_path: Path) -> None:
    index = write(tmp_path / "model.ptd", [])
    assert (index.entries, read_index(tmp_path / "model.ptd")) == ((), index)


def test_gaps_are_zero_even_over_a_stale_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"
    (tmp_path / "model.ptd.partial").write_bytes(b"\xff" * 100_000)
    index = write(path, [Weight("a", "uint8", (5,), (0,)), Weight("b", "uint8", (4097,), (0,))])
    data = bytearray(path.read_bytes())
    header = parse_header(path, bytes(data[:48]), len(data))
    spans = [(0, header.flatbuffer_end_bytes), *((e.offset_bytes, e.length_bytes) for e in index.entries)]
    metadata_bytes = data.rindex(b'{"format"')
    for offset_bytes, length_bytes in [*spans, (metadata_bytes, len(data) - metadata_bytes)]:
        data[offset_bytes : offset_bytes + length_bytes] = bytes(length_bytes)
    assert not any(data)
    assert list(tmp_path.iterdir()) == [path]


def test_chunks_may_be_any_bytes_like_shape(tmp_path: Path) -> None:
    weight = Weight("w", "int32", (2, 3), (0, 1))
    raw = payload(weight)
    table = memoryview(raw).cast("B").cast("i", (2, 3))
    pieces = {
        "table": [table],
        "bytearray": [bytearray(raw)],
        "with empty ones": [b"", raw[:7], memoryview(b""), bytearray(), raw[7:], b""],
    }
    for pieces_of_one in pieces.values():
        index = write_ptd(tmp_path / "model.ptd", [weight], lambda _, p=pieces_of_one: p, identity="i")  # type: ignore[misc]
        offset_bytes = index["w"].offset_bytes
        assert (tmp_path / "model.ptd").read_bytes()[offset_bytes : offset_bytes + 24] == raw


def test_on_bytes_adds_up(tmp_path: Path) -> None:
    seen: list[int] = []
    write_ptd(tmp_path / "model.ptd", [TIED], chunks_of, states=STATES, identity="i", on_bytes=seen.append)
    assert sum(seen) == TIED.nbytes + STATES[0].nbytes
    assert max(seen) == 100


def test_reading_the_index_touches_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.ptd"
    written = write(path, [Weight(f"w{number}", "uint8", (50_000,), (0,)) for number in range(20)])
    reads: list[tuple[int, int]] = []
    pread = os.pread

    def recording_pread(fd: int, count_bytes: int, offset_bytes: int) -> bytes:
        reads.append((offset_bytes, offset_bytes + count_bytes))
        return pread(fd, count_bytes, offset_bytes)

    monkeypatch.setattr(os, "pread", recording_pread)
    assert read_index(path) == written
    assert len(reads) == 3
    for entry in written.entries:
        for start_bytes, end_bytes in reads:
            assert end_bytes <= entry.offset_bytes or start_bytes >= entry.offset_bytes + entry.length_bytes


def test_a_missing_name_is_named(tmp_path: Path) -> None:
    index = write(tmp_path / "model.ptd", [TIED])
    with pytest.raises(WeightsFileError, match=r"model\.ptd: has no entry 'absent' among its 3"):
        index["absent"]
