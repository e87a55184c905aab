"""One amount of memory for weights and caches: never more than there is, and no better division of whole blocks."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.cache_share import CacheGroup, Division, WeightsRange, divide
from penstock.plan.tuning import CACHE_FILL, FAR_READ_COST

BLOCK = 4
groups = st.lists(
    st.builds(
        CacheGroup,
        names=st.just(("cache",)),
        capacity=st.integers(1, 30),
        position_bytes=st.integers(1, 1000),
        block_positions=st.just(BLOCK),
    ),
    max_size=2,
)


@st.composite
def ranges(draw: st.DrawFn) -> WeightsRange:
    floor_bytes = draw(st.integers(0, 5000))
    return WeightsRange(floor_bytes, floor_bytes + draw(st.integers(0, 50_000)), draw(st.integers(0, 20_000)))


def cost(weights: WeightsRange, caches: list[CacheGroup], division: Division) -> float:
    """Bytes of the link in one run, as the module's docstring has it."""
    streamed = max(0, weights.full_bytes - division.weights_bytes - weights.hidden_bytes)
    far = sum(
        max(0.0, CACHE_FILL * group.capacity - near) * group.position_bytes
        for group, near in zip(caches, division.positions, strict=True)
    )
    return streamed + FAR_READ_COST * far


def splits(group: CacheGroup) -> list[int]:
    return [*range(0, group.capacity, BLOCK), group.capacity]


@given(ranges(), groups, st.integers(0, 120_000))
def test_all_of_it_is_given_and_no_more(weights: WeightsRange, caches: list[CacheGroup], more: int) -> None:
    division = divide(weights.floor_bytes + more, weights, caches)
    near_bytes = sum(near * group.position_bytes for group, near in zip(caches, division.positions, strict=True))
    assert division.weights_bytes + near_bytes == weights.floor_bytes + more
    assert division.weights_bytes >= weights.floor_bytes
    for group, near in zip(caches, division.positions, strict=True):
        assert near == group.capacity or (0 <= near < group.capacity and near % BLOCK == 0)
    if more >= weights.full_bytes - weights.floor_bytes + sum(group.nbytes for group in caches):
        assert division.positions == tuple(group.capacity for group in caches)


@given(ranges(), groups, st.integers(0, 120_000))
def test_no_division_is_better_by_more_than_the_blocks_that_rounding_leaves(
    weights: WeightsRange, caches: list[CacheGroup], more: int
) -> None:
    room_bytes = weights.floor_bytes + more
    found = cost(weights, caches, divide(room_bytes, weights, caches))
    others = [
        Division(room_bytes - taken, near)
        for near in product(*map(splits, caches))
        if (taken := sum(n * group.position_bytes for n, group in zip(near, caches, strict=True))) <= more
    ]
    best = min(cost(weights, caches, other) for other in others)
    rounding = sum(FAR_READ_COST * BLOCK * group.position_bytes for group in caches)
    assert best <= found <= best + rounding


def test_filled_positions_go_before_weights_and_weights_before_the_others() -> None:
    weights, group = WeightsRange(1000, 9000), CacheGroup(("a", "b"), 40, 100, BLOCK)
    divisions = [divide(room, weights, [group]) for room in (1000, 1399, 1400, 3000, 10_999, 11_400, 13_000)]
    assert divisions == [
        Division(1000, (0,)),
        Division(1399, (0,)),
        Division(1000, (4,)),
        Division(1000, (20,)),
        Division(8999, (20,)),
        Division(9000, (24,)),
        Division(9000, (40,)),
    ]


def test_what_is_streamed_for_nothing_leaves_more_for_the_cache() -> None:
    group = CacheGroup(("a",), 40, 100, BLOCK)
    assert divide(5000, WeightsRange(1000, 9000, hidden_bytes=8000), [group]) == Division(1000, (40,))


def test_less_than_the_floor_is_refused() -> None:
    with pytest.raises(ValueError, match="999 bytes for weights and caches; weights alone need 1000"):
        divide(999, WeightsRange(1000, 9000), [])
