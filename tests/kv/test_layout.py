"""What is launched: every position once, no more programs than allowed towards the host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.layout import (
    MOST_MULTIPROCESSORS,
    MOST_ROWS,
    PARTIAL_ELEMENT_BYTES,
    SLOTS,
    Layout,
    lay_out,
    workspace_bound_bytes,
)


def llama(rows: int, device_positions: int, host_positions: int, host_programs: int = 4) -> Layout:
    return lay_out(
        batch=1,
        kv_heads=8,
        rows=rows,
        position_bytes=4096,
        device_positions=device_positions,
        host_positions=host_positions,
        host_programs=host_programs,
        multiprocessors=132,
    )


def test_decoding_reads_the_host_in_place() -> None:
    layout = llama(rows=4, device_positions=8192, host_positions=8192)
    assert (layout.rows, layout.row_blocks) == (16, 1)
    assert layout.device_splits == 32, "two programs for each multiprocessor, less those that face the host"
    assert layout.host_splits == 2, "four tasks for each of four programs"
    assert layout.pieces == 0


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 64), st.integers(64, 4000), st.integers(0, 4000))
def test_all_programs_fit_at_once(rows: int, lines: int, programs: int, near: int, far: int) -> None:
    """Two on each multiprocessor, those that face the host among them; but at least one for each line."""
    layout = lay_out(
        batch=1,
        kv_heads=lines,
        rows=rows,
        position_bytes=4096,
        device_positions=near,
        host_positions=far,
        host_programs=programs,
        multiprocessors=132,
    )
    facing = min(programs, lines * layout.host_splits)
    assert lines * layout.device_splits + facing <= max(264, lines + facing)
    assert layout.device_splits >= 1


def test_a_chunk_is_staged_and_crosses_the_link_once() -> None:
    layout = llama(rows=4 * 512, device_positions=8192, host_positions=20_000)
    assert (layout.rows, layout.row_blocks) == (MOST_ROWS, 32)
    assert (layout.host_splits, layout.staged_positions, layout.pieces) == (0, 8192, 3)


@given(st.integers(1, 5000), st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 9), st.integers(1, 2**20))
def test_all_of_both_sides_is_covered(rows: int, near: int, far: int, programs: int, staging: int) -> None:
    layout = lay_out(
        batch=2,
        kv_heads=2,
        rows=rows,
        position_bytes=512,
        device_positions=near,
        host_positions=far,
        host_programs=programs,
        multiprocessors=8,
        staging_bytes=staging,
    )
    assert layout.rows * layout.row_blocks >= rows > layout.rows * (layout.row_blocks - 1)
    assert (layout.device_splits > 0) == (near > 0)
    # The host side is read in place by one block of rows, or staged; never read again by a second block.
    assert (layout.host_splits > 0) == (far > 0 and layout.row_blocks == 1)
    assert (layout.pieces > 0) == (layout.staged_splits > 0) == (far > 0 and layout.row_blocks > 1)
    if layout.pieces:
        assert layout.pieces * layout.staged_positions >= far > (layout.pieces - 1) * layout.staged_positions
        assert layout.staged_positions * 512 <= max(staging, SLOTS * 512)


def test_no_program_towards_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="host_programs is 0"):
        llama(1, 1, 1, host_programs=0)


@given(
    batch=st.integers(1, 5),
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 9),
    tokens=st.integers(1, 700),
    later=st.integers(0, 300),
    near=st.integers(0, 9000),
    far=st.integers(0, 9000),
    programs=st.integers(1, 70),
    multiprocessors=st.integers(1, MOST_MULTIPROCESSORS),
)
def test_the_workspace_has_a_bound(
    batch: int,
    kv_heads: int,
    group: int,
    tokens: int,
    later: int,
    near: int,
    far: int,
    programs: int,
    multiprocessors: int,
) -> None:
    """For these tokens and for more, on every GPU; and not a wild one."""
    position_bytes = 2 * batch * kv_heads * 128 * 2
    layout = lay_out(
        batch=batch,
        kv_heads=kv_heads,
        rows=group * tokens,
        position_bytes=position_bytes,
        device_positions=near,
        host_positions=far,
        host_programs=programs,
        multiprocessors=multiprocessors,
    )
    heads = kv_heads * group
    # As launch.py allocates: an output and a logarithm for each row of each split, and a piece of the host side.
    needed = layout.splits * batch * heads * tokens * (128 + 1) * PARTIAL_ELEMENT_BYTES
    needed += layout.staged_positions * position_bytes
    bounds = [
        workspace_bound_bytes(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            tokens=most,
            head_dim=128,
            element_bytes=2,
            device_positions=near,
            host_positions=far,
            host_programs=programs,
        )
        for most in (tokens, tokens + later)
    ]
    assert needed <= bounds[0] <= bounds[1]
    if multiprocessors == MOST_MULTIPROCESSORS and group * tokens >= 2 * MOST_ROWS and near and far:
        assert bounds[0] <= 4 * needed


def test_more_multiprocessors_than_the_bound_counts_on() -> None:
    with pytest.raises(ValueError, match="multiprocessors is 257; it must be 1 to 256"):
        lay_out(
            batch=1,
            kv_heads=1,
            rows=1,
            position_bytes=4,
            device_positions=1,
            host_positions=0,
            host_programs=1,
            multiprocessors=257,
        )
