"""What is launched: programs in whole waves, staging in whole blocks, and a bound for what it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.layout import (
    MOST_MULTIPROCESSORS,
    MOST_ROWS,
    PARTIAL_ELEMENT_BYTES,
    PARTS,
    RESERVED_PROGRAMS,
    LaunchLayout,
    lay_out,
    workspace_bound_bytes,
)
from penstock.kv.split import BLOCK_POSITIONS


def llama(rows: int, capacity: int) -> LaunchLayout:
    return lay_out(
        batch=1,
        kv_heads=8,
        rows=rows,
        position_bytes=4096,
        element_bytes=2,
        capacity=capacity,
        multiprocessors=132,
    )


def test_decoding_reads_the_host_in_place() -> None:
    layout = llama(rows=4, capacity=16384)
    assert (layout.rows, layout.row_blocks) == (16, 1)
    assert layout.parts == 31, "two programs for each multiprocessor, less those that may face the host"
    assert not layout.is_staged and layout.pieces(8192) == []


@given(st.integers(1, 64), st.integers(1, 600), st.integers(1, MOST_MULTIPROCESSORS))
def test_programs_fill_whole_waves(rows: int, lines: int, multiprocessors: int) -> None:
    """With those that face the host among them: none begins alone when all others are done."""
    layout = lay_out(
        batch=1,
        kv_heads=lines,
        rows=rows,
        position_bytes=4096,
        element_bytes=2,
        capacity=2**20,
        multiprocessors=multiprocessors,
    )
    wave = 2 * multiprocessors
    assert layout.parts >= PARTS // 2
    idle = -(lines * layout.parts + RESERVED_PROGRAMS) % wave
    assert idle < lines, "one part more would have been another wave"


def test_a_chunk_is_staged_and_crosses_the_link_once() -> None:
    layout = llama(rows=4 * 512, capacity=28_192)
    assert (layout.rows, layout.row_blocks, layout.parts) == (MOST_ROWS, 32, 1)
    assert [len(piece) for piece in layout.pieces(20_000)] == [8192, 8192, 3616]
    assert layout.pieces(0) == []


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(0, 46), st.integers(1, 2**20), st.sampled_from([2, 4]))
def test_pieces_are_blocks_and_cover_the_host_side(
    rows: int, capacity: int, blocks: int, staging: int, element_bytes: int
) -> None:
    layout = lay_out(
        batch=2,
        kv_heads=2,
        rows=rows,
        position_bytes=512,
        element_bytes=element_bytes,
        capacity=capacity,
        multiprocessors=8,
        staging_bytes=staging,
    )
    assert layout.rows * layout.row_blocks >= rows > layout.rows * (layout.row_blocks - 1)
    assert layout.parts >= 1
    # The host side is read in place by one block of rows, or staged; never read again by a second block.
    assert layout.is_staged == (layout.row_blocks > 1)
    far = max(0, capacity - blocks * BLOCK_POSITIONS)
    pieces = layout.pieces(far)
    if layout.is_staged:
        assert [slot for piece in pieces for slot in piece] == list(range(far))
        assert all(len(piece) * 512 <= max(staging, BLOCK_POSITIONS * 512) for piece in pieces)
        assert all(piece.start % BLOCK_POSITIONS == 0 for piece in pieces)


@given(
    batch=st.integers(1, 5),
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 9),
    tokens=st.integers(1, 700),
    later=st.integers(0, 300),
    capacity=st.integers(1, 18000),
    multiprocessors=st.integers(1, MOST_MULTIPROCESSORS),
)
def test_the_workspace_has_a_bound(
    batch: int, kv_heads: int, group: int, tokens: int, later: int, capacity: int, multiprocessors: int
) -> None:
    """For these tokens and for more, on every GPU; and not a wild one."""
    position_bytes = 2 * batch * kv_heads * 128 * 2
    layout = lay_out(
        batch=batch,
        kv_heads=kv_heads,
        rows=group * tokens,
        position_bytes=position_bytes,
        element_bytes=2,
        capacity=capacity,
        multiprocessors=multiprocessors,
    )
    heads = kv_heads * group
    # As launch.py allocates: an output and two numbers for each row of each part, and a piece of the host side.
    needed = layout.parts * batch * heads * tokens * (128 + 2) * PARTIAL_ELEMENT_BYTES
    needed += layout.staged_positions * position_bytes
    bounds = [
        workspace_bound_bytes(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            tokens=most,
            head_dim=128,
            element_bytes=2,
            capacity=capacity,
        )
        for most in (tokens, tokens + later)
    ]
    assert needed <= bounds[0] <= bounds[1]
    if multiprocessors == MOST_MULTIPROCESSORS and group * tokens >= 2 * MOST_ROWS:
        assert bounds[0] <= 5 * needed


def test_more_multiprocessors_than_the_bound_counts_on() -> None:
    with pytest.raises(ValueError, match="multiprocessors is 257; it must be 1 to 256"):
        lay_out(
            batch=1,
            kv_heads=1,
            rows=1,
            position_bytes=4,
            element_bytes=2,
            capacity=1,
            multiprocessors=257,
        )
