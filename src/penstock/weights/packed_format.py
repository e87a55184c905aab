"""The fixed parts of a packed entry: its header, the limits of its blocks' sizes, and which dtypes there are.

    0    'PSPK', u16 version, u16 kind, u64 raw bytes, u32 raw bytes per block, u32 block count, u64 layout checksum
    32   u32 size of each block, in units of 16 bytes; zeros up to a multiple of 16
    ...  the blocks, one behind the other

"Raw" bytes are those of the tensor, as an unpacked entry holds them. For the blocks: csrc/packed/packed_block.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from penstock.weight import ITEM_BYTES
from penstock.weights.format import SCALAR_TYPES, aligned_bytes

MAGIC = b"PSPK"
# By dtype, the kind in the header of newly packed entries: how many bits exponent and mantissa have, and which code
# the exponents have. No other dtype is packed.
KINDS: dict[str, int] = {
    "bfloat16": 6,
    "float32": 2,
    "float16": 3,
    "float8_e4m3fn": 4,
    "float8_e4m3fnuz": 4,
    "float8_e5m2": 5,
    "float8_e5m2fnuz": 5,
}
# The same for entries that were packed earlier and are still read.
EARLIER_KINDS: dict[str, int] = {"bfloat16": 1}
# By kind, the version of header and record. Readers of version 1 know only the first two kinds, those of version 2 all
# but the last.
VERSIONS: dict[int, int] = {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3}
BLOCK_RAW_BYTES = 64 << 10
UNIT_BYTES = 16

HEADER = struct.Struct("<4sHHQIIQ")

_ITEM_BYTES = {kind: ITEM_BYTES[dtype] for kinds in (KINDS, EARLIER_KINDS) for dtype, kind in kinds.items()}
_MANTISSA_BITS = {1: 7, 2: 23, 3: 10, 4: 3, 5: 2, 6: 7}
_SIGN_BITS = 1
_CODE_BITS = 3
_TILE_VALUES = 1024
_BLOCK_HEADER_BYTES = 16
# The kind whose exponents have codes of three levels: two bits for every value, three more for some, a byte for a few.
_LEVELS_KIND = 6
_FIRST_BITS, _SECOND_BITS = 2, 3


@dataclass(frozen=True)
class Packing:
    """How an entry's bytes are packed, as far as the index knows. The block table is read on its own."""

    kind: int
    # xxh3_64 of the stored bytes: header, table and blocks.
    checksum: int


def layout_checksum(dtype: str, shape: Sequence[int], dim_order: Sequence[int]) -> int:
    """Goes into the header, so that a reader without the index notices an entry of another tensor; 0 in older entries.
    Dimensions of size 1 may stand anywhere. csrc/packed_entry.cpp of the ExecuTorch delegate computes the same."""
    order = [dim for dim in dim_order if shape[dim] != 1]
    numbers = (SCALAR_TYPES[dtype], len(shape), *shape, *order)
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))


def block_count(raw_bytes: int) -> int:
    return -(-raw_bytes // BLOCK_RAW_BYTES)


def table_end_bytes(count: int) -> int:
    """Where the first block begins, from the start of the entry."""
    return HEADER.size + aligned_bytes(4 * count, UNIT_BYTES)


def kind_of(dtype: str, version: int) -> int | None:
    """The kind that entries of a dtype have in a version; None if no such entry is read."""
    found = (kinds[dtype] for kinds in (KINDS, EARLIER_KINDS) if dtype in kinds)
    return next((kind for kind in found if VERSIONS[kind] == version), None)


def versions_of(dtype: str) -> list[int]:
    """The versions in which entries of a dtype are read."""
    return sorted(VERSIONS[kinds[dtype]] for kinds in (KINDS, EARLIER_KINDS) if dtype in kinds)


def block_limits_bytes(kind: int, raw_bytes: int) -> tuple[int, int]:
    """The least and the most bytes of one block: with no escapes, and with escapes only."""
    tiles = -(-raw_bytes // (_ITEM_BYTES[kind] * _TILE_VALUES))
    has_levels = kind == _LEVELS_KIND
    starts_bytes = 4 * (tiles + 1) if has_levels else 2 * tiles
    code_bits = _FIRST_BITS if has_levels else _CODE_BITS
    more_bits = 8 + (_SECOND_BITS if has_levels else 0)
    values = tiles * _TILE_VALUES
    least_bytes = aligned_bytes(_BLOCK_HEADER_BYTES + starts_bytes, UNIT_BYTES)
    least_bytes += values * (code_bits + _SIGN_BITS + _MANTISSA_BITS[kind]) // 8
    return least_bytes, least_bytes + values * more_bits // 8


def entry_limits_bytes(kind: int, raw_bytes: int) -> tuple[int, int]:
    """The least and the most bytes of a whole entry."""
    whole, rest_bytes = divmod(raw_bytes, BLOCK_RAW_BYTES)
    least_bytes = most_bytes = table_end_bytes(block_count(raw_bytes))
    for count, block_raw_bytes in ((whole, BLOCK_RAW_BYTES), (1 if rest_bytes else 0, rest_bytes)):
        block_least_bytes, block_most_bytes = block_limits_bytes(kind, block_raw_bytes)
        least_bytes += count * block_least_bytes
        most_bytes += count * block_most_bytes
    return least_bytes, most_bytes
