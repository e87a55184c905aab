"""Blocks with damage in them, unpacked between guards. Also run with the address sanitizer, which sees reads."""

from __future__ import annotations

import ctypes
import random
import sys

from penstock.native import core
from penstock.weight import ITEM_BYTES
from penstock.weights.packed_format import block_limits_bytes
from tests.weights.packed_cases import DTYPES

# By kind.
VALUE_BYTES = {kind: ITEM_BYTES[dtype] for kind, dtype in DTYPES.items()}
GUARD_BYTES = 4096


def guarded(count_bytes: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """A buffer with a guard on either side, and the address between them."""
    whole = ctypes.create_string_buffer(b"\xa5" * (count_bytes + 2 * GUARD_BYTES), count_bytes + 2 * GUARD_BYTES)
    return whole, ctypes.addressof(whole) + GUARD_BYTES


def packed_block(kind: int, raw: bytes) -> bytes:
    capacity = core().penstock_packed_most_bytes(kind, len(raw))
    whole, out = guarded(capacity)
    sizes = (ctypes.c_int64 * 1)()
    packed_bytes = core().penstock_pack_blocks(kind, raw, len(raw), out, capacity, sizes, 1)
    assert packed_bytes == sizes[0]
    check_guards(whole, capacity)
    return whole.raw[GUARD_BYTES : GUARD_BYTES + packed_bytes]


def unpacked(kind: int, block: bytes, raw_bytes: int) -> bytes:
    whole, out = guarded(raw_bytes)
    # Of exactly its size, so that a read behind it is one outside of an allocation.
    packed = (ctypes.c_char * len(block)).from_buffer_copy(block)
    sizes = (ctypes.c_int64 * 1)(len(block))
    assert core().penstock_unpack_blocks(kind, packed, len(block), sizes, raw_bytes, out, 1) == 0
    check_guards(whole, raw_bytes)
    return whole.raw[GUARD_BYTES : GUARD_BYTES + raw_bytes]


def check_guards(whole: ctypes.Array[ctypes.c_char], count_bytes: int) -> None:
    guard = b"\xa5" * GUARD_BYTES
    assert whole.raw[:GUARD_BYTES] == guard and whole.raw[GUARD_BYTES + count_bytes :] == guard


def stress(seed: int, cases: int) -> int:
    """Returns how many blocks came out otherwise than they went in."""
    rng = random.Random(seed)
    changed = 0
    for _ in range(cases):
        kind = rng.choice(list(VALUE_BYTES))
        value_bytes = VALUE_BYTES[kind]
        values = rng.choice((1, 5, 1024, 1025, 3000, 65536 // value_bytes))
        raw = rng.randbytes(values * value_bytes) if rng.random() < 0.5 else rng.randbytes(value_bytes) * values
        block = bytearray(packed_block(kind, raw))
        assert unpacked(kind, bytes(block), len(raw)) == raw
        least_bytes, _ = block_limits_bytes(kind, len(raw))
        for _ in range(rng.choice((1, 4, 50))):
            # Header and starts lie in the first bytes.
            place = rng.randrange(rng.choice((16, 160, len(block))) if len(block) > 160 else len(block))
            block[place] = rng.choice((0, 0xFF, rng.randrange(256)))
        if rng.random() < 0.5:  # without the escapes that the codes ask for
            del block[least_bytes + 16 * rng.randrange((len(block) - least_bytes) // 16 + 1) :]
        if rng.random() < 0.3:
            block[:least_bytes] = rng.randbytes(least_bytes)
        changed += unpacked(kind, bytes(block), len(raw)) != raw
    return changed


if __name__ == "__main__":
    if sys.argv[1] == "overrun":  # shows that the check can fail
        small = (ctypes.c_char * 1000)()
        core().penstock_unpack_blocks(6, small, 1 << 16, (ctypes.c_int64 * 1)(1 << 16), 1 << 16, bytes(1 << 16), 1)
    else:
        stress(seed=1, cases=400)
    print("done")
