"""The rule that divides positions between the sides, and what follows from it for the link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.failures import KVCacheCapError
from penstock.kv.split import BLOCK_POSITIONS, CacheShape, Split, split_within, step_traffic

SHAPE = CacheShape(layers=3, batch=2, kv_heads=4, head_dim=16, element_bytes=2)
splits = st.builds(
    Split, st.integers(0, 3).map(lambda blocks: blocks * BLOCK_POSITIONS), st.integers(0, 40)
) | st.builds(Split, st.integers(0, 100), st.just(0))


@given(splits, st.data())
def test_nothing_is_far_while_there_is_room_near(split: Split, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, split.capacity))
    assert split.host_length(length) == 0 or split.device_length(length) == split.device_positions
    assert split.host_length(length) + split.device_length(length) == length
    assert split.host_length(length) <= split.host_positions


@given(st.integers(0, 500_000), st.integers(1, 300))
def test_the_cap_is_kept_and_used(cap: int, max_length: int) -> None:
    split = split_within(SHAPE, max_length=max_length, device_cap_bytes=cap)
    column = SHAPE.batch * SHAPE.position_bytes
    assert split.capacity == max_length
    assert split.device_positions * column <= cap
    assert split.host_positions == 0 or split.device_positions % BLOCK_POSITIONS == 0
    assert split.host_positions == 0 or min(split.device_positions + BLOCK_POSITIONS, max_length) * column > cap


def test_one_byte_less_is_one_block_less() -> None:
    column = SHAPE.batch * SHAPE.position_bytes
    assert SHAPE.position_bytes == 3 * 2 * 4 * 16 * 2
    assert split_within(SHAPE, max_length=150, device_cap_bytes=128 * column) == Split(128, 22)
    assert split_within(SHAPE, max_length=150, device_cap_bytes=128 * column - 1) == Split(64, 86)
    assert split_within(SHAPE, max_length=150, device_cap_bytes=150 * column) == Split(150, 0)
    assert split_within(SHAPE, max_length=150, device_cap_bytes=150 * column - 1) == Split(128, 22)


def test_traffic_of_a_step_across_the_boundary() -> None:
    """One block near. One sequence stays near, one crosses over."""
    traffic = step_traffic(SHAPE, Split(64, 10), starts=[2, 63], counts=[3, 4])
    assert traffic.link_read_bytes == 3 * SHAPE.position_bytes
    assert traffic.link_written_bytes == 3 * SHAPE.position_bytes
    assert traffic.device_read_bytes == (5 + 64) * SHAPE.position_bytes


def test_an_idle_sequence_is_not_read() -> None:
    traffic = step_traffic(SHAPE, Split(64, 10), starts=[70, 70], counts=[0, 1])
    assert traffic.link_read_bytes == 7 * SHAPE.position_bytes
    assert traffic.link_written_bytes == SHAPE.position_bytes


def test_refusals_name_what_they_got() -> None:
    with pytest.raises(KVCacheCapError, match="device_cap_bytes is -1"):
        split_within(SHAPE, max_length=8, device_cap_bytes=-1)
    with pytest.raises(ValueError, match="max_length is 0"):
        split_within(SHAPE, max_length=0, device_cap_bytes=0)
    with pytest.raises(ValueError, match="kv_heads is 0"):
        CacheShape(1, 1, 0, 1, 1)
    with pytest.raises(ValueError, match="-1 positions on the device"):
        Split(-1, 2)
    with pytest.raises(
        ValueError, match="4 positions on the device and 5 on the host: the first must be a multiple of 64"
    ):
        Split(4, 5)
