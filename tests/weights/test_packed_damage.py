"""Damaged blocks: found by their checksums, and never a reason to read or write beside a buffer."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ChecksumError, WeightsFileError
from penstock.native import core
from penstock.weights import read_index, verify_checksums
from penstock.weights.packed_format import block_limits_bytes
from penstock.weights.packing import pack, raw_content, unpack
from tests.runtime.builds import COMPILER, SOURCES
from tests.weights.block_stress import GUARD_BYTES, VALUE_BYTES, guarded, packed_block, stress, unpacked
from tests.weights.packed_cases import DTYPES, earlier_code, gaussian, packable, single


def test_all_escapes(tmp_path: Path) -> None:
    """As many exponents as there are: most values have none of the codes."""
    for kind, dtype in DTYPES.items():
        raw = np.random.default_rng(2).bytes(65536)
        block = packed_block(kind, raw)
        least_bytes, most_bytes = block_limits_bytes(kind, len(raw))
        assert least_bytes < len(block) <= most_bytes, dtype
        assert unpacked(kind, block, len(raw)) == raw


@pytest.mark.parametrize("kind", VALUE_BYTES)
@pytest.mark.parametrize("values", [1, 2, 7, 1023, 1024, 1025, 5000])
def test_blocks_of_a_few_values(kind: int, values: int) -> None:
    for raw in (random.Random(values).randbytes(values * VALUE_BYTES[kind]), bytes(values * VALUE_BYTES[kind])):
        block = packed_block(kind, raw)
        least_bytes, most_bytes = block_limits_bytes(kind, len(raw))
        assert least_bytes <= len(block) <= most_bytes and len(block) % 16 == 0
        assert unpacked(kind, block, len(raw)) == raw


def test_nothing_to_pack() -> None:
    assert core().penstock_packed_most_bytes(1, 0) == 0
    assert core().penstock_pack_blocks(1, None, 0, None, 0, None, 2) == 0
    assert core().penstock_unpack_blocks(1, None, 0, None, 0, None, 2) == 0


def test_what_the_core_refuses() -> None:
    raw = ctypes.create_string_buffer(64)
    sizes = (ctypes.c_int64 * 1)()
    for kind, raw_bytes in ((0, 64), (7, 64), (1, 63), (6, 63), (2, 62), (3, 63), (1, -2), (4, -1)):
        assert core().penstock_packed_most_bytes(kind, raw_bytes) == -1
        assert core().penstock_pack_blocks(kind, raw, raw_bytes, raw, 1 << 20, sizes, 1) == -1
        assert core().penstock_unpack_blocks(kind, raw, 64, sizes, raw_bytes, raw, 1) == 1
    for kind, (least_bytes, most_bytes) in ((kind, block_limits_bytes(kind, 64)) for kind in VALUE_BYTES):
        assert core().penstock_packed_most_bytes(kind, 64) == most_bytes
        assert core().penstock_pack_blocks(kind, raw, 64, raw, most_bytes - 1, sizes, 1) == -1
        for size in (-1, 0, least_bytes - 1, least_bytes + 1, 2**62):
            sizes[0] = size
            assert core().penstock_unpack_blocks(kind, raw, least_bytes, sizes, 64, raw, 1) == 1


def test_damaged_blocks_stay_within_their_buffers() -> None:
    """Between two stretches that nobody may write to; tests/weights/test_packed_sanitizer.py sees reads as well."""
    assert stress(seed=0, cases=400) > 250


def test_other_vectors_make_the_same_bytes(tmp_path: Path) -> None:
    """What a CPU without AVX2 runs. On such a one both are the same code."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no compiler {COMPILER}")
    sources = [str(SOURCES / name) for name in ("packed/packed_block.cpp", "packed/packed_api.cpp")]
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-DPENSTOCK_PLAIN_VECTORS", f"-I{SOURCES}"]
    subprocess.run([COMPILER, *flags, *sources, "-o", str(tmp_path / "plain.so")], check=True)
    plain = ctypes.CDLL(str(tmp_path / "plain.so"))
    for name in ("penstock_pack_blocks", "penstock_unpack_blocks"):
        function = getattr(core(), name)
        getattr(plain, name).argtypes, getattr(plain, name).restype = function.argtypes, function.restype
    for kind, dtype in DTYPES.items():
        for raw in (gaussian(dtype, 9000), np.random.default_rng(3).bytes(8 * 1031)):
            block = packed_block(kind, raw)
            out, sizes = ctypes.create_string_buffer(1 << 17), (ctypes.c_int64 * 1)()
            packed_bytes = plain.penstock_pack_blocks(kind, raw, len(raw), out, len(out), sizes, 1)
            assert out.raw[:packed_bytes] == block, dtype
            assert plain.penstock_unpack_blocks(kind, block, len(block), sizes, len(raw), out, 1) == 0
            assert out.raw[: len(raw)] == raw, dtype


def test_the_guard_sees_a_write() -> None:
    whole, inner = guarded(32)
    ctypes.memset(inner + 32, 1, 1)
    assert bytes(whole[GUARD_BYTES + 32 :]) != b"\xa5" * GUARD_BYTES


@pytest.mark.parametrize("code", [nullcontext, earlier_code])
def test_a_flipped_byte_anywhere_is_found(tmp_path: Path, code: Callable[[], AbstractContextManager[Any]]) -> None:
    """In header, table, codes, rests, starts, escapes or padding: the checksum of the stored bytes covers them."""
    single(tmp_path / "model.ptd", "bfloat16", gaussian("bfloat16", 32768 + 2000))
    with code():
        index = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")
    entry, whole = index["w"], index.path.read_bytes()
    rng = random.Random(0)
    places = [*range(96), *(rng.randrange(entry.length_bytes) for _ in range(150)), entry.length_bytes - 1]
    for place in places:
        changed = bytearray(whole)
        changed[entry.offset_bytes + place] ^= 1 << rng.randrange(8)
        index.path.write_bytes(changed)
        with pytest.raises(ChecksumError, match="1 of 1 entries are damaged: 'w' has .* as packed, needs"):
            verify_checksums(index)
    index.path.write_bytes(whole)
    verify_checksums(index)


@pytest.mark.parametrize(("place", "error"), [(0, WeightsFileError), (40, WeightsFileError), (20_000, ChecksumError)])
def test_what_is_damaged_is_not_unpacked(tmp_path: Path, place: int, error: type[WeightsFileError]) -> None:
    index = pack(packable(tmp_path / "model.ptd"), tmp_path / "packed.ptd")
    whole = bytearray(index.path.read_bytes())
    whole[index["tied"].offset_bytes + place] ^= 1
    index.path.write_bytes(whole)
    with pytest.raises(error, match="entry 'tied'"):
        unpack(index.path, tmp_path / "again.ptd")
    assert not list(tmp_path.glob("again*"))


def test_blocks_of_other_values_are_found(tmp_path: Path) -> None:
    """The stored checksum fits what is stored; the tensor's does not."""
    index = pack(packable(tmp_path / "model.ptd"), tmp_path / "packed.ptd")
    text = index.path.read_bytes()
    entry = index["tied"]
    assert entry.checksum is not None
    # Somebody who reseals the file, of which there is no use here: the index is changed behind the reader's back.
    object.__setattr__(entry, "checksum", entry.checksum ^ 1)
    with pytest.raises(ChecksumError, match="1 of 9 entries are damaged: 'tied' unpacks to"):
        verify_checksums(index)
    assert index.path.read_bytes() == text


def test_every_damaged_entry_is_listed_with_bytes_told_once(tmp_path: Path) -> None:
    index = pack(packable(tmp_path / "model.ptd"), tmp_path / "packed.ptd")
    whole = bytearray(index.path.read_bytes())
    whole[index["tied"].offset_bytes] ^= 1
    whole[index["columns"].offset_bytes + 9000] ^= 1
    whole[index["small"].offset_bytes] ^= 1
    index.path.write_bytes(whole)
    seen: list[int] = []
    with pytest.raises(ChecksumError, match="3 of 9 entries are damaged") as caught:
        verify_checksums(index, seen.append)
    assert all(f"'{name}'" in str(caught.value) for name in ("tied", "columns", "small"))
    assert sum(seen) == sum(entry.length_bytes for entry in index.unique_entries)


def test_a_file_cut_after_its_index_was_read(tmp_path: Path) -> None:
    index = pack(packable(tmp_path / "model.ptd"), tmp_path / "packed.ptd")
    with index.path.open("r+b") as file:
        file.truncate(index["tied"].offset_bytes + 20_000)
    with pytest.raises(WeightsFileError, match="entry 'tied' was truncated"):
        raw_content(index, index["tied"])
    with pytest.raises(WeightsFileError, match="truncated"):
        read_index(index.path)
