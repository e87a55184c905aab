"""What is launched for given shapes: plain data, worked out without torch.

Nothing here looks at lengths: they are numbers on the device, and asking for them would be a wait in every layer.
Nothing that decides the order of additions looks at where the sides meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.kv.split import BLOCK_POSITIONS

# The largest block of rows that attends to the host side in place. For a chunk of more rows, the host side is staged:
# read over the link once into device memory, where every block of rows finds it.
MOST_ROWS = 64
STAGING_BYTES = 32 * 2**20
# All tiles have the same size in bytes, so that three of keys and three of values fit beside the rest: a block of
# 2-byte elements, or half a block of 4-byte elements.
TILE_COLUMN_BYTES = 2 * BLOCK_POSITIONS
# Parts of a line, about: the number follows from whole waves. A program that faces the host reads all of a part that
# reaches into the host side, so with fewer parts it would read too much of the device side. On an H200, 8 sequences of
# 8,192 positions with 1% far took 194 us with 8 parts, 108 with 32 and 86 with 49; but one of 32,768, all near, took 45
# with 31 and 53 with 64.
PARTS = 32
# Room for programs that face the host, even if there are none: the parts must not depend on that.
RESERVED_PROGRAMS = 16
# More than any GPU has, so that the bound on memory for partial results does not depend on the GPU.
MOST_MULTIPROCESSORS = 256
PARTIAL_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class LaunchLayout:
    rows: int
    row_blocks: int
    # Partial results of each row.
    parts: int
    # Host positions that are staged at a time; 0: they are read in place.
    staged_positions: int

    @property
    def is_staged(self) -> bool:
        return self.staged_positions > 0

    def pieces(self, host_positions: int) -> list[range]:
        """The ranges of host slots that are staged, one after the other."""
        if not self.is_staged:
            return []
        starts = range(0, host_positions, self.staged_positions)
        return [range(start, min(start + self.staged_positions, host_positions)) for start in starts]


def lay_out(
    *,
    batch: int,
    kv_heads: int,
    rows: int,
    position_bytes: int,
    element_bytes: int,
    capacity: int,
    multiprocessors: int,
    staging_bytes: int = STAGING_BYTES,
) -> LaunchLayout:
    """`rows` are query heads of a group times tokens; `position_bytes` is one position of the whole batch."""
    if not 1 <= multiprocessors <= MOST_MULTIPROCESSORS:
        raise ValueError(f"multiprocessors is {multiprocessors}; it must be 1 to {MOST_MULTIPROCESSORS}")
    block = min(MOST_ROWS, max(16, 1 << (rows - 1).bit_length()))
    row_blocks = math.ceil(rows / block)
    lines = batch * kv_heads * row_blocks
    # Two programs fit on a multiprocessor. One program more than all of them hold would begin when the others are done,
    # so programs come in whole waves.
    wave = 2 * multiprocessors
    if row_blocks > 1:
        parts = min(max(1, wave // lines), math.ceil(capacity / tile_slots(element_bytes)))
        return LaunchLayout(block, row_blocks, parts, _piece_positions(capacity, position_bytes, staging_bytes))
    waves = max(1, round((PARTS * lines + RESERVED_PROGRAMS) / wave))
    parts = min((waves * wave - RESERVED_PROGRAMS) // lines, math.ceil(capacity / BLOCK_POSITIONS))
    return LaunchLayout(block, row_blocks, parts, staged_positions=0)


def tile_slots(element_bytes: int) -> int:
    """Positions that a program loads at a time."""
    return TILE_COLUMN_BYTES // element_bytes


def workspace_bound_bytes(
    *, batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, element_bytes: int, capacity: int
) -> int:
    """The most that one call of attention allocates beside its output for up to `tokens` tokens, on any GPU, wherever
    the sides meet: partial results with their sums, staging, and a copy of the query."""
    rows = batch * heads * tokens
    row_bytes = (head_dim + 2) * PARTIAL_ELEMENT_BYTES
    # A wave over lines of at most MOST_ROWS rows each, plus what PARTS parts round up to in whole waves.
    part_rows = 2 * MOST_MULTIPROCESSORS * MOST_ROWS + PARTS * min(rows, batch * kv_heads * MOST_ROWS)
    partial_rows = min(max(part_rows, rows), math.ceil(capacity / tile_slots(element_bytes)) * rows)
    staged_bytes = 0
    if heads // kv_heads * tokens > MOST_ROWS:
        position_bytes = 2 * batch * kv_heads * head_dim * element_bytes
        staged_bytes = _piece_positions(capacity, position_bytes, STAGING_BYTES) * position_bytes
    return partial_rows * row_bytes + staged_bytes + rows * head_dim * element_bytes


def _piece_positions(capacity: int, position_bytes: int, staging_bytes: int) -> int:
    blocks = max(1, staging_bytes // position_bytes // BLOCK_POSITIONS)
    return min(capacity, blocks * BLOCK_POSITIONS)
