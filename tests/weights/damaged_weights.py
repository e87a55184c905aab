"""Packed weights with damage in one of their blocks, part by part, for whatever decodes them: on the host, on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.weights.packed_format import block_limits_bytes
from tests.weights.block_stress import VALUE_BYTES
from tests.weights.kernel_stress import BLOCK_BYTES, TILE_VALUES, blocks_of
from tests.weights.packed_cases import DTYPES, gaussian

# Parts of a block, as docs/format.md has them; and a block that ends before the escapes that its codes ask for.
PARTS = ("header", "starts", "planes and rests", "escapes", "cut", "everything")
# Values of the last block: beside a tile and within one. Of most weights it is the only one, which is quicker.
LAST_VALUES = (1, 1023, 1025, 3000)
_HEADER_BYTES = 16
_LEVELS_KIND = 6

# As Kernels.decoded of tests/weights/kernel_stress.py: kind, blocks, raw bytes, first value, end; fails where something
# beside the output was written.
Decode = Callable[[int, list[bytes], int, int, int], bytes]


@dataclass(frozen=True)
class DamagedWeight:
    kind: int
    part: str
    raw: bytes
    blocks: list[bytes]
    # Of the block that is damaged.
    number: int


def damaged_weights(seed: int, count: int) -> Iterator[DamagedWeight]:
    """Of every kind in turn, and of every kind damaged in every part in turn."""
    rng = random.Random(seed)
    kinds = list(VALUE_BYTES)
    for case in range(count):
        kind, part = kinds[case % len(kinds)], PARTS[case // len(kinds) % len(PARTS)]
        whole_blocks = rng.choice((0, 0, 0, 1, 2))
        values = whole_blocks * BLOCK_BYTES // VALUE_BYTES[kind] + rng.choice(LAST_VALUES)
        # Bytes of any value escape nearly all; and those that weights have, few.
        raw = (
            rng.randbytes(values * VALUE_BYTES[kind])
            if rng.random() < 0.5
            else gaussian(DTYPES[kind], values, seed=case)
        )
        blocks = blocks_of(kind, raw)
        number = rng.randrange(len(blocks))
        raw_bytes = min(BLOCK_BYTES, len(raw) - number * BLOCK_BYTES)
        blocks[number] = _damaged(rng, kind, part, blocks[number], raw_bytes)
        yield DamagedWeight(kind, part, raw, blocks, number)


def check(decode: Decode, weight: DamagedWeight) -> None:
    """Whole and from the middle of a tile to that of another. What a damaged block stands for is left open; the others
    are what they were."""
    value_bytes = VALUE_BYTES[weight.kind]
    values = len(weight.raw) // value_bytes
    # Kernels write sixteen bytes at a time, so a part begins at such.
    for begin, end in ((0, values), (values // 3 // 16 * 16, values - values // 7)):
        made = decode(weight.kind, weight.blocks, len(weight.raw), begin, end)
        assert len(made) == (end - begin) * value_bytes
        for number in range(len(weight.blocks)):
            low = max(begin * value_bytes, number * BLOCK_BYTES)
            high = min(end * value_bytes, (number + 1) * BLOCK_BYTES)
            if number != weight.number and low < high:
                found = made[low - begin * value_bytes : high - begin * value_bytes]
                assert found == weight.raw[low:high], (weight.kind, weight.part, number)


def _damaged(rng: random.Random, kind: int, part: str, block: bytes, raw_bytes: int) -> bytes:
    """Of a size that such a block can have, which is what a reader asks of it."""
    changed = bytearray(block)
    tiles = -(-raw_bytes // (VALUE_BYTES[kind] * TILE_VALUES))
    # Behind the rests: with codes of three levels, those of the second come first.
    escapes_begin, _ = block_limits_bytes(kind, raw_bytes)
    starts_end = _HEADER_BYTES + (4 * (tiles + 1) if kind == _LEVELS_KIND else 2 * tiles)
    if part in ("cut", "everything"):
        del changed[escapes_begin + 16 * rng.randrange((len(changed) - escapes_begin) // 16 + 1) :]
    if part == "everything":
        return rng.randbytes(len(changed))
    begin, end = {
        "header": (0, _HEADER_BYTES),
        "starts": (_HEADER_BYTES, starts_end),
        "planes and rests": (starts_end, escapes_begin),
        # Without any the codes ask for some that are not there.
        "escapes": (escapes_begin, len(changed)) if len(changed) > escapes_begin else (starts_end, escapes_begin),
        "cut": (starts_end, escapes_begin),
    }[part]
    for _ in range(rng.choice((1, 4, 50))):
        changed[rng.randrange(begin, end)] = rng.choice((0, 0xFF, rng.randrange(256)))
    return bytes(changed)
