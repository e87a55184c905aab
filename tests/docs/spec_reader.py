"""A reader of both files, written from docs/format.md alone: nothing here is the library's.

It trusts the file: what a careful reader refuses is tested elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash


@dataclass(frozen=True)
class Found:
    """What a key of a weights file names."""

    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    kind: str
    offset_bytes: int
    data: bytes
    checksum: str
    scalar_type: int | None


class Table:
    def __init__(self, raw: bytes, at: int) -> None:
        self.raw, self.at = raw, at
        self.vtable = at - struct.unpack_from("<i", raw, at)[0]
        self.vtable_bytes = struct.unpack_from("<H", raw, self.vtable)[0]

    def place(self, slot: int) -> int | None:
        if 4 + 2 * slot >= self.vtable_bytes:
            return None
        offset = struct.unpack_from("<H", self.raw, self.vtable + 4 + 2 * slot)[0]
        return self.at + offset if offset else None

    def number(self, slot: int, code: str) -> int:
        place = self.place(slot)
        value: int = 0 if place is None else struct.unpack_from("<" + code, self.raw, place)[0]
        return value

    def pointed(self, slot: int) -> int | None:
        place = self.place(slot)
        return None if place is None else place + struct.unpack_from("<I", self.raw, place)[0]

    def vector(self, slot: int, code: str) -> tuple[int, ...]:
        start = self.pointed(slot)
        assert start is not None
        count = struct.unpack_from("<I", self.raw, start)[0]
        return struct.unpack_from(f"<{count}{code}", self.raw, start + 4)

    def tables(self, slot: int) -> list[Table]:
        start = self.pointed(slot)
        assert start is not None
        places = [start + 4 + 4 * index for index in range(struct.unpack_from("<I", self.raw, start)[0])]
        return [Table(self.raw, place + struct.unpack_from("<I", self.raw, place)[0]) for place in places]


def read_weights(path: Path) -> tuple[str, dict[str, Found]]:
    """The identity, and what every key names."""
    raw = path.read_bytes()
    assert raw[4:8] == b"FT01" and raw[8:12] == b"FH01"
    length, offset, size, base, data_bytes = struct.unpack_from("<IQQQQ", raw, 12)
    assert (length, offset) == (40, 48) and raw[48:56] == bytes(8)
    assert base >= offset + size and base + data_bytes == len(raw)
    root = Table(raw[: offset + size], struct.unpack_from("<I", raw)[0])
    assert root.number(0, "I") == 0
    segments = [(table.number(0, "Q"), table.number(1, "Q")) for table in root.tables(1)]
    keys: dict[str, tuple[int, Table | None]] = {}
    for table in root.tables(2):
        name = bytes(table.vector(0, "B")).decode()
        assert name not in keys
        layout = table.pointed(2)
        keys[name] = table.number(1, "I"), None if layout is None else Table(table.raw, layout)

    def content(index: int) -> bytes:
        begin = base + segments[index][0]
        return raw[begin : begin + segments[index][1]]

    text = content(keys.pop("penstock.json")[0])
    check_seal(text, raw[: offset + size])
    document = json.loads(text)
    has_plans = any(entry["kind"] == "plans" for entry in document["entries"])
    is_packed = any("packed" in entry for entry in document["entries"])
    assert document["format"] == (4 if has_plans else 3 if is_packed else 2)
    found: dict[str, Found] = {}
    for entry in document["entries"]:
        for name in (entry["name"], *entry["aliases"]):
            index, layout_table = keys.pop(name)
            shape, dim_order = tuple(entry["shape"]), tuple(entry["dim_order"])
            if layout_table is not None:
                assert (layout_table.vector(1, "i"), layout_table.vector(2, "B")) == (shape, dim_order)
                assert "packed" not in entry
            found[name] = Found(
                dtype=entry["dtype"],
                shape=shape,
                dim_order=dim_order,
                kind=entry["kind"],
                offset_bytes=base + segments[index][0],
                data=unpacked(content(index), entry) if "packed" in entry else content(index),
                checksum=entry["xxh3_64"],
                scalar_type=None if layout_table is None else layout_table.number(0, "b"),
            )
    assert not keys
    gaps = bytearray(raw)
    gaps[: offset + size] = bytes(offset + size)
    for begin, count in segments:
        gaps[base + begin : base + begin + count] = bytes(count)
    assert not any(gaps), "bytes between segments must be zero"
    return document["identity"], found


def unpacked(segment: bytes, entry: Mapping[str, Any]) -> bytes:
    magic, version, kind, raw_bytes, block_raw_bytes, count, layout = struct.unpack_from("<4sHHQIIQ", segment)
    order = [dim for dim in entry["dim_order"] if entry["shape"][dim] != 1]
    numbers = [NUMBERS[entry["dtype"]], len(entry["shape"]), *entry["shape"], *order]
    needed = xxhash.xxh3_64_intdigest(b"".join(number.to_bytes(8, "little") for number in numbers))
    assert (magic, version, block_raw_bytes, layout) == (b"PSPK", VERSIONS[kind], 65536, needed)
    sizes = struct.unpack_from(f"<{count}I", segment, 32)
    at = -(-(32 + 4 * count) // 16) * 16
    assert not any(segment[32 + 4 * count : at])
    raw = b""
    for size in sizes:
        block, block_raw_bytes = segment[at : at + 16 * size], min(65536, raw_bytes - len(raw))
        raw += unpacked_levels(block, block_raw_bytes) if kind == 6 else unpacked_block(block, kind, block_raw_bytes)
        at += 16 * size
    assert (at, len(raw)) == (len(segment), raw_bytes)
    return raw


NUMBERS = {
    **{"float16": 5, "float32": 6, "bfloat16": 15},
    **{"float8_e5m2": 23, "float8_e4m3fn": 24, "float8_e5m2fnuz": 25, "float8_e4m3fnuz": 26},
}
VERSIONS = {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3}
# By kind: bits of the exponent, bits of the mantissa, R and P. Kind 6 has another code.
KINDS = {1: (8, 7, 1, 0), 2: (8, 23, 3, 0), 3: (5, 10, 1, 3), 4: (4, 3, 0, 4), 5: (5, 2, 0, 3)}


def unpacked_block(block: bytes, kind: int, raw_bytes: int) -> bytes:
    exponent_bits, mantissa_bits, runs, rest_planes = KINDS[kind]
    item_bytes = (1 + exponent_bits + mantissa_bits) // 8
    tiles = -(-raw_bytes // (1024 * item_bytes))
    (escape_count,) = struct.unpack_from("<I", block, 8)
    starts = struct.unpack_from(f"<{tiles}H", block, 16)
    planes_at = -(-(16 + 2 * tiles) // 16) * 16
    rests_at = planes_at + 128 * (3 + rest_planes) * tiles
    escapes_at = rests_at + 1024 * runs * tiles
    assert len(block) == -(-(escapes_at + escape_count) // 16) * 16
    raw = b""
    for tile in range(tiles):
        planes = struct.unpack_from(f"<{32 * (3 + rest_planes)}I", block, planes_at + 128 * (3 + rest_planes) * tile)
        tile_rests = block[rests_at + 1024 * runs * tile :]
        values = [0] * 1024
        escape = escapes_at + starts[tile]
        for lane in range(32):
            for bit in range(32):
                number = 256 * (bit % 4) + 8 * lane + bit // 4
                bits = sum((planes[32 * plane + lane] >> bit & 1) << plane for plane in range(3 + rest_planes))
                code, rest = bits & 7, bits >> 3 << 8 * runs
                rest |= sum(tile_rests[1024 * run + number] << 8 * run for run in range(runs))
                exponent = block[code] if code else block[escape]
                escape += not code
                sign, mantissa = divmod(rest, 1 << mantissa_bits)
                values[number] = (sign << exponent_bits | exponent) << mantissa_bits | mantissa
        raw += b"".join(value.to_bytes(item_bytes, "little") for value in values)
    return raw[:raw_bytes]


def unpacked_levels(block: bytes, raw_bytes: int) -> bytes:
    tiles = -(-raw_bytes // 2048)
    (groups,) = struct.unpack_from("<I", block, 4)
    planes_at = -(-(16 + 4 * (tiles + 1)) // 16) * 16
    rests_at = planes_at + 256 * tiles
    groups_at = rests_at + 1024 * tiles
    escapes_at = groups_at + 12 * groups
    values = []
    second = escape = 0
    for tile in range(tiles):
        assert struct.unpack_from("<HH", block, 16 + 4 * tile) == (second, escape)
        planes = struct.unpack_from("<64I", block, planes_at + 256 * tile)
        for number in range(1024):
            lane, bit = number % 256 // 8, number % 8 * 4 + number // 256
            first_code = (planes[lane] >> bit & 1) | (planes[32 + lane] >> bit & 1) << 1
            exponent = block[first_code]
            if not first_code:
                words = struct.unpack_from("<3I", block, groups_at + second // 32 * 12)
                bit = second % 8 * 4 + second % 32 // 8
                second_code = sum((word >> bit & 1) << plane for plane, word in enumerate(words))
                exponent = block[8 + second_code] if second_code else block[escapes_at + escape]
                second += 1
                escape += not second_code
            sign, mantissa = divmod(block[rests_at + 1024 * tile + number], 128)
            values.append((sign << 8 | exponent) << 7 | mantissa)
    assert struct.unpack_from("<HH", block, 16 + 4 * tiles) == (second, escape)
    assert groups == -(-second // 32) and len(block) == -(-(escapes_at + escape) // 16) * 16
    return b"".join(value.to_bytes(2, "little") for value in values)[:raw_bytes]


def tensor_elements(found: Found, item_bytes: int) -> list[bytes]:
    """The elements of the tensor in row-major order of its own shape."""
    rank = len(found.shape)
    stored_shape = [found.shape[d] for d in found.dim_order]
    strides = [0] * rank
    for position, dim in enumerate(found.dim_order):
        strides[dim] = math.prod(stored_shape[position + 1 :])
    elements = []
    for number in range(math.prod(found.shape)):
        at, rest = 0, number
        for dim in reversed(range(rank)):
            at += rest % found.shape[dim] * strides[dim]
            rest //= found.shape[dim]
        elements.append(found.data[at * item_bytes : (at + 1) * item_bytes])
    return elements


def check_seal(text: bytes, outside: bytes = b"") -> None:
    body, seal = text[:-77], text[-77:]
    assert seal == b', "seal": "' + hashlib.sha256(outside + body).hexdigest().encode() + b'"}'


def read_program(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        (name,) = (member for member in archive.namelist() if member.endswith("/extra/penstock.json"))
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        raw = archive.read(name)
        check_seal(raw)
        document: dict[str, Any] = json.loads(raw)
        members = [member for member in archive.namelist() if "/data/aotinductor/" in member]
        code = {member.split("/")[3] for member in members}
        contents = {member.partition("/")[2]: archive.read(member) for member in members}
    assert document["format_version"] == 6
    assert {row["name"]: (row["nbytes"], row["sha256"]) for row in document["code"]} == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    }
    assert code == {method["name"] for method in document["methods"]}
    return document


def identity(program: dict[str, Any]) -> str:
    document = {
        "states": sorted([s["name"], s["dtype"], s["shape"], s["dim_order"]] for s in program["states"]),
        "weights": sorted(
            [w["name"], sorted(w["aliases"]), w["dtype"], w["shape"], w["dim_order"]] for w in program["weights"]
        ),
    }
    text = json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
