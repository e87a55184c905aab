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
# More than any GPU has: what is allocated for partial results has a bound that does not depend on where it runs.
MOST_MULTIPROCESSORS = 256
PARTIAL_ELEMENT_BYTES = 4


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
    if not 1 <= multiprocessors <= MOST_MULTIPROCESSORS:
        raise ValueError(f"multiprocessors is {multiprocessors}; it must be 1 to {MOST_MULTIPROCESSORS}")
    if host_programs < 1:
        raise ValueError(f"host_programs is {host_programs}; at least one program must read the host side")
    block = min(MOST_ROWS, max(16, 1 << (rows - 1).bit_length()))
    row_blocks = math.ceil(rows / block)
    lines = batch * kv_heads * row_blocks

    def splits(positions: int, programs: int) -> int:
        return min(math.ceil(programs / lines), math.ceil(positions / SLOTS))

    staged = row_blocks > 1 and host_positions > 0
    in_place = host_positions > 0 and not staged
    # Two programs fit on a multiprocessor, and one more than all of them hold would begin when the others are done. So
    # those that face the host are counted, and the near side is cut into whole splits of what is left.
    near_programs = 2 * multiprocessors - (host_programs if in_place else 0)
    near_splits = min(max(1, near_programs // lines), math.ceil(device_positions / SLOTS))
    piece = _piece_positions(host_positions, position_bytes, staging_bytes) if staged else 0
    return Layout(
        rows=block,
        row_blocks=row_blocks,
        device_splits=near_splits,
        host_splits=splits(host_positions, TASKS_PER_HOST_PROGRAM * host_programs) if in_place else 0,
        staged_positions=piece,
        staged_splits=splits(piece, 2 * multiprocessors),
        pieces=math.ceil(host_positions / piece) if staged else 0,
    )


def workspace_bound_bytes(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    head_dim: int,
    element_bytes: int,
    device_positions: int,
    host_positions: int,
    host_programs: int,
) -> int:
    """The most that one call of attention allocates beside its output for up to so many tokens, on any GPU: partial
    results with their logarithms, staging, and a copy of the query."""
    rows = batch * heads * tokens
    row_bytes = (head_dim + 1) * PARTIAL_ELEMENT_BYTES

    def partial_rows(positions: int, programs: int) -> int:
        # `programs` over lines of at most MOST_ROWS rows each, rounded up to one more for every line.
        return min(programs * MOST_ROWS + rows, math.ceil(positions / SLOTS) * rows)

    position_bytes = 2 * batch * kv_heads * head_dim * element_bytes
    device_rows = partial_rows(device_positions, 2 * MOST_MULTIPROCESSORS)
    in_place_bytes = partial_rows(host_positions, TASKS_PER_HOST_PROGRAM * host_programs) * row_bytes
    staged_bytes = 0
    if heads // kv_heads * tokens > MOST_ROWS and host_positions:
        piece = _piece_positions(host_positions, position_bytes, STAGING_BYTES)
        pieces = math.ceil(host_positions / piece)
        staged_bytes = piece * position_bytes + pieces * partial_rows(piece, 2 * MOST_MULTIPROCESSORS) * row_bytes
    return device_rows * row_bytes + max(in_place_bytes, staged_bytes) + rows * head_dim * element_bytes


def _piece_positions(host_positions: int, position_bytes: int, staging_bytes: int) -> int:
    return min(host_positions, max(SLOTS, staging_bytes // position_bytes // SLOTS * SLOTS))
