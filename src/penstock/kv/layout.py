"""What is launched for given shapes: plain data, worked out without torch.

Lengths are not looked at: they are numbers on the device, and asking for them would be a wait in every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The largest block of rows that attends to the host side in place. A chunk of more rows is staged: read over the link
# once, into device memory, where every block of rows then finds it.
MOST_ROWS = 64
STAGING_BYTES = 32 * 2**20
SLOTS = 64
# Tasks for each program that faces the host: enough that they end at about the same time.
TASKS_PER_HOST_PROGRAM = 4


@dataclass(frozen=True)
class Layout:
    rows: int
    row_blocks: int
    device_splits: int
    # 0 when the host side is staged, or has no room.
    host_splits: int
    # Host positions that are staged at a time, and the splits of each such piece.
    staged_positions: int
    staged_splits: int
    pieces: int

    @property
    def splits(self) -> int:
        return self.device_splits + self.host_splits + self.pieces * self.staged_splits


def lay_out(
    *,
    batch: int,
    kv_heads: int,
    rows: int,
    position_bytes: int,
    device_positions: int,
    host_positions: int,
    host_programs: int,
    multiprocessors: int,
    staging_bytes: int = STAGING_BYTES,
) -> Layout:
    """`rows` are query heads of a group times tokens; `position_bytes` is one position of the whole batch."""
    if host_programs < 1:
        raise ValueError(f"host_programs is {host_programs}; at least one program must read the host side")
    block = min(MOST_ROWS, max(16, 1 << (rows - 1).bit_length()))
    row_blocks = math.ceil(rows / block)
    lines = batch * kv_heads * row_blocks

    def splits(positions: int, programs: int) -> int:
        return min(math.ceil(programs / lines), math.ceil(positions / SLOTS))

    staged = row_blocks > 1 and host_positions > 0
    piece = min(host_positions, max(SLOTS, staging_bytes // position_bytes // SLOTS * SLOTS)) if staged else 0
    return Layout(
        rows=block,
        row_blocks=row_blocks,
        device_splits=splits(device_positions, 2 * multiprocessors),
        host_splits=0 if staged else splits(host_positions, TASKS_PER_HOST_PROGRAM * host_programs),
        staged_positions=piece,
        staged_splits=splits(piece, 2 * multiprocessors),
        pieces=math.ceil(host_positions / piece) if staged else 0,
    )
