"""A file's bytes are those that were written, or the weights that changed are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ChecksumError, WeightsFileError
from penstock.weight import Weight
from penstock.weights import read_index, verify_checksums, write_ptd
from tests.weights.ptd_cases import EVERY_KIND, STATES, TIED, Crafted, write


def flip(path: Path, offset_bytes: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        (byte,) = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte ^ (1 << bit)]))


def test_an_intact_file_passes_and_every_byte_is_read_once(tmp_path: Path) -> None:
    index = write(tmp_path / "model.ptd", [*EVERY_KIND, TIED], STATES)
    seen: list[int] = []
    verify_checksums(tmp_path / "model.ptd", seen.append)
    assert sum(seen) == sum(entry.length_bytes for entry in index.unique_entries)
    verify_checksums(index)


def test_one_flipped_bit_in_any_weight_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"
    index = write(path, [*EVERY_KIND, TIED], STATES)
    for number, entry in enumerate(entry for entry in index.unique_entries if entry.length_bytes):
        offset_bytes = entry.offset_bytes + (number * 7919) % entry.length_bytes
        flip(path, offset_bytes, number % 8)
        with pytest.raises(ChecksumError, match=rf"1 of \d+ entries are damaged: '{entry.name}' has"):
            verify_checksums(index)
        flip(path, offset_bytes, number % 8)
    verify_checksums(index)


@pytest.mark.parametrize("where", ["first", "last"])
def test_the_ends_of_a_weight_longer_than_the_buffer_count(tmp_path: Path, where: str) -> None:
    weight = Weight("long", "uint8", ((16 << 20) + 5,), (0,))
    path = tmp_path / "model.ptd"
    index = write_ptd(path, [weight], lambda _: [bytes(weight.nbytes)], identity="i")
    seen: list[int] = []
    verify_checksums(index, seen.append)
    assert (sum(seen), max(seen)) == (weight.nbytes, 16 << 20)
    entry = index["long"]
    flip(path, entry.offset_bytes + (0 if where == "first" else entry.length_bytes - 1), 0)
    with pytest.raises(ChecksumError, match="'long'"):
        verify_checksums(index)


def test_every_damaged_weight_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"
    index = write(path, [TIED, Weight("a", "int8", (4,), (0,)), Weight("b", "int8", (4,), (0,))])
    flip(path, index["b"].offset_bytes, 0)
    flip(path, index[TIED.name].offset_bytes + 1, 3)
    with pytest.raises(ChecksumError) as caught:
        verify_checksums(path)
    message = str(caught.value)
    assert "2 of 3 entries are damaged" in message
    assert "'embed.weight' has" in message
    assert f"needs {index['b'].checksum:016x}" in message
    assert "'a'" not in message


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = write(tmp_path / "model.ptd", [TIED])
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset_bytes: preadv(fd, [buffers[0][:9]], offset_bytes))
    seen: list[int] = []
    verify_checksums(index, seen.append)
    assert (sum(seen), max(seen)) == (TIED.nbytes, 9)


def test_a_file_without_checksums_is_refused(tmp_path: Path) -> None:
    crafted = Crafted()
    crafted.metadata = None
    path = crafted.write(tmp_path / "foreign.ptd")
    with pytest.raises(WeightsFileError, match="entry 'first' has no checksum") as caught:
        verify_checksums(path)
    assert not isinstance(caught.value, ChecksumError)


def test_a_file_cut_after_its_index_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"
    index = write(path, [TIED])
    os.truncate(path, index[TIED.name].offset_bytes + 10)
    with pytest.raises(WeightsFileError, match=r"truncated: entry 'embed.weight' has 10 bytes, needs 4620"):
        verify_checksums(index)
    with pytest.raises(WeightsFileError, match="truncated"):
        read_index(path)
