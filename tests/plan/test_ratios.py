"""The allocation of ratios against an exact optimiser, against uniform ratios, and worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.ratios import Operation, TimeCurve, allocate, uniform

DEVICE, LINK = 4e12, 50e9


def direct_curve(
    nbytes: int, *, device_bytes_per_s: float, link_bytes_per_s: float, arithmetic_s: float = 0.0
) -> TimeCurve:
    """An operation that reads both sides at once: the longest of its reads and its arithmetic."""

    def seconds(ratio: float) -> float:
        return max(arithmetic_s, (1 - ratio) * nbytes / device_bytes_per_s, ratio * nbytes / link_bytes_per_s)

    corners = {0.0, 1.0, link_bytes_per_s / (link_bytes_per_s + device_bytes_per_s)}
    corners.add(1 - arithmetic_s * device_bytes_per_s / nbytes)
    corners.add(arithmetic_s * link_bytes_per_s / nbytes)
    return TimeCurve(tuple((ratio, seconds(ratio)) for ratio in sorted(corners) if 0 <= ratio <= 1))


@st.composite
def curves(draw: st.DrawFn) -> TimeCurve:
    """Convex: slopes in rising order, some of them negative; the curve may end before 1."""
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    slopes = sorted(draw(st.lists(st.integers(-200, 400), min_size=len(lengths), max_size=len(lengths))))
    most = draw(st.sampled_from((1.0, 0.75)))
    ends = np.concatenate(([0.0], np.cumsum(lengths) / sum(lengths))) * most
    times = np.concatenate(([0.0], np.cumsum(np.diff(ends) * slopes)))
    times -= times.min() - draw(st.integers(0, 20))
    return TimeCurve(tuple(zip(ends.tolist(), times.tolist(), strict=True)))


operations = st.lists(st.builds(Operation, st.text(max_size=3), st.integers(1, 1000), curves()), min_size=1, max_size=6)


def exact_seconds(ops: list[Operation], ratio: float) -> float:
    """A linear program that knows nothing of segments: a convex curve is the largest of its lines."""
    from scipy.optimize import linprog

    count = len(ops)
    rows, bounds = [], []
    for index, op in enumerate(ops):
        for (begin, first), (end, last) in pairwise(op.curve.points):
            slope = (last - first) / (end - begin)
            row = np.zeros(2 * count)
            row[index], row[count + index] = slope, -1
            rows.append(row)
            bounds.append(slope * begin - first)
    enough = np.zeros(2 * count)
    enough[:count] = [-op.nbytes for op in ops]
    rows.append(enough)
    bounds.append(-ratio * sum(op.nbytes for op in ops))
    found = linprog(
        np.concatenate((np.zeros(count), np.ones(count))),
        A_ub=np.array(rows),
        b_ub=np.array(bounds),
        bounds=[(0, op.curve.most) for op in ops] + [(None, None)] * count,
    )
    assert found.status == 0, found.message
    return float(found.fun)


@settings(deadline=None, max_examples=80)
@given(operations, st.floats(0, 0.75))
def test_no_allocation_is_faster(ops: list[Operation], ratio: float) -> None:
    found = allocate(ops, ratio)
    total = sum(op.nbytes for op in ops)
    assert found.host_bytes >= ratio * total - 1e-6 * total
    assert all(0 <= r <= op.curve.most for op, r in zip(ops, found.ratios, strict=True))
    assert found.seconds == pytest.approx(exact_seconds(ops, ratio), abs=1e-6)


@settings(deadline=None)
@given(operations, st.floats(0, 0.75))
def test_never_slower_than_uniform_ratios(ops: list[Operation], ratio: float) -> None:
    assert allocate(ops, ratio).seconds <= uniform(ops, ratio).seconds + 1e-9


def test_what_rounding_leaves_is_not_the_way_to_the_next_corner() -> None:
    """A sum of segments that misses what was asked for by a bit: the ratio was then the begin of the next segment."""
    ends = (np.concatenate(([0.0], np.cumsum([6, 11, 1, 48, 50]) / 116)) * 0.75).tolist()
    times = np.concatenate(([0.0], np.cumsum(np.diff(ends) * [0, 1, 1, 1, 1]))).tolist()
    operation = Operation("one", 31, TimeCurve(tuple(zip(ends, times, strict=True))))
    ratio = 0.10507395840265274
    found = allocate([operation], ratio)
    assert found.ratios == pytest.approx((ratio,), rel=1e-12)
    assert found.seconds <= uniform([operation], ratio).seconds + 1e-12


@given(operations, st.floats(0, 0.75))
def test_what_is_reported_is_what_the_ratios_come_to(ops: list[Operation], ratio: float) -> None:
    found = allocate(ops, ratio)
    assert found.seconds == pytest.approx(sum(op.curve.seconds(r) for op, r in zip(ops, found.ratios, strict=True)))
    assert found.host_bytes == pytest.approx(sum(op.nbytes * r for op, r in zip(ops, found.ratios, strict=True)))
    assert found.names == tuple(op.name for op in ops)


def mixed_batch() -> list[Operation]:
    """A product that is bound by its arithmetic beside attention that is bound by its reads."""
    product, cache = 400_000_000, 400_000_000
    return [
        Operation(
            "mlp", product, direct_curve(product, device_bytes_per_s=DEVICE, link_bytes_per_s=LINK, arithmetic_s=4e-3)
        ),
        Operation("kv", cache, direct_curve(cache, device_bytes_per_s=DEVICE, link_bytes_per_s=LINK)),
    ]


def test_the_gap_to_uniform_is_real() -> None:
    """A quarter of all bytes. 4 ms of arithmetic hide 200 MB of link, all of the quarter: nothing is left to pay.

    Attention offloads its balance point besides, which makes it faster: 50/4050 of 400 MB.
    """
    ops = mixed_batch()
    found, even = allocate(ops, 0.25), uniform(ops, 0.25)
    balance = 50 / 4050
    assert even.seconds == pytest.approx(4e-3 + 2e-3)
    assert found.by_name["kv"] == pytest.approx(balance)
    assert found.by_name["mlp"] == pytest.approx(0.5 - balance)
    assert found.seconds == pytest.approx(4e-3 + (1 - balance) * 400e6 / DEVICE)
    assert even.seconds / found.seconds > 1.4


def test_beyond_everything_free_the_link_is_paid_once() -> None:
    """All of it on the host: both ways agree, and the link's time is what it takes."""
    found = allocate(mixed_batch(), 1.0)
    assert found.ratios == (1.0, 1.0)
    assert found.seconds == pytest.approx(8e-3 + 8e-3)


def test_no_ratio_asked_for_is_still_the_fastest() -> None:
    """Up to its balance point an operation is faster with some of its bytes behind the link; no further."""
    found = allocate(mixed_batch()[1:], 0.0)
    assert found.by_name["kv"] == pytest.approx(50 / 4050)
    assert found.seconds < uniform(mixed_batch()[1:], 0.0).seconds


def test_direct_curves_have_their_corners() -> None:
    curve = direct_curve(1000, device_bytes_per_s=100.0, link_bytes_per_s=25.0, arithmetic_s=9.0)
    assert [ratio for ratio, _ in curve.points] == pytest.approx([0, 0.1, 0.2, 0.225, 1.0])
    assert [seconds for _, seconds in curve.points] == pytest.approx([10, 9, 9, 9, 40])
    assert curve.seconds(0.15) == pytest.approx(9) and curve.seconds(0.6125) == pytest.approx(24.5)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "must rise from 0"),
        (((0.1, 1.0), (1.0, 1.0)), "must rise from 0"),
        (((0.0, 1.0), (0.0, 2.0)), "must rise from 0"),
        (((0.0, 1.0), (1.1, 2.0)), "at most 1"),
        (((0.0, -1.0), (1.0, 2.0)), "-1.0 s at ratio 0.0"),
        (((0.0, 1.0), (0.5, 3.0), (1.0, 4.0)), "not convex at ratio 0.5: 4.0 s per unit before it, 2.0 after"),
    ],
)
def test_malformed_curves_are_refused(points: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimeCurve(points)


def test_what_cannot_be_offloaded_is_refused() -> None:
    half = Operation("embedding", 100, TimeCurve(((0.0, 1.0), (0.5, 2.0))))
    with pytest.raises(ValueError, match="0.6 is 60 of 100 bytes; the operations allow 50"):
        allocate([half], 0.6)
    assert allocate([half], 0.5).ratios == (0.5,)
    with pytest.raises(ValueError, match="global ratio of 1.5"):
        allocate([half], 1.5)
    with pytest.raises(ValueError, match="'empty' reads 0 bytes"):
        Operation("empty", 0, half.curve)
    with pytest.raises(ValueError, match="ratio 0.7 is not between 0 and 0.5"):
        uniform([half], 0.7)
