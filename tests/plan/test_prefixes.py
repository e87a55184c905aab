"""Prefixes by the time they save: against an exact optimiser, against equal parts, and worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.in_place import FreePages, SplittableWeight, allocate_prefixes, best_parts
from penstock.weight import Weight

PAGE = 512
ROW = 16

# By method: seconds with the weight on the device, and in place.
times = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 10)), min_size=1, max_size=3)
weights = st.lists(
    st.builds(
        lambda rows, known: SplittableWeight("", rows * ROW, rows, PAGE, known), st.integers(17, 4000), times
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


def exact_s(some: list[SplittableWeight], room_bytes: float) -> float:
    """A linear program that knows nothing of stretches: what a method takes longer is the largest of its lines."""
    from scipy.optimize import linprog

    methods = [(index, *both) for index, weight in enumerate(some) for both in weight.times]
    count = len(some)
    rows, bounds = [np.array([1.0] * count + [0.0] * len(methods))], [room_bytes]
    for number, (index, resident_s, direct_s) in enumerate(methods):
        row = np.zeros(count + len(methods))
        row[index], row[count + number] = -direct_s / some[index].nbytes, -1
        rows.append(row)
        bounds.append(resident_s - direct_s)
    found = linprog(
        np.concatenate((np.zeros(count), np.ones(len(methods)))),
        A_ub=np.array(rows),
        b_ub=np.array(bounds),
        bounds=[(0, weight.nbytes) for weight in some] + [(0, None)] * len(methods),
    )
    assert found.status == 0, found.message
    return float(found.fun)


def added_s(some: list[SplittableWeight], prefixes: list[float]) -> float:
    return sum(weight.added_s(nbytes) for weight, nbytes in zip(some, prefixes, strict=True))


@settings(deadline=None, max_examples=80)
@given(weights, st.floats(0, 1))
def test_no_parts_save_more(some: list[SplittableWeight], part: float) -> None:
    room_bytes = part * sum(weight.nbytes for weight in some)
    found = best_parts(some, room_bytes)
    assert sum(found) <= room_bytes * (1 + 1e-9) + 1e-6
    assert all(-1e-6 <= nbytes <= weight.nbytes + 1e-6 for weight, nbytes in zip(some, found, strict=True))
    assert added_s(some, found) == pytest.approx(exact_s(some, room_bytes), abs=1e-6)
    equal = [part * weight.nbytes for weight in some]
    assert added_s(some, found) <= added_s(some, equal) + 1e-9


@settings(deadline=None, max_examples=80)
@given(weights, st.floats(0, 1))
def test_in_rows_and_pages_little_is_lost(some: list[SplittableWeight], part: float) -> None:
    """Beside parts of any size: at most what a grain of rows, its pages and the last page of each weight could save."""
    some = [SplittableWeight(f"w{index}", one.nbytes, one.rows, PAGE, one.times) for index, one in enumerate(some)]
    named = [Weight(one.name, "bfloat16", (one.rows, ROW // 2), (0, 1)) for one in some]
    pages = int(part * sum(one.nbytes for one in some)) // PAGE
    found = allocate_prefixes(named, [], {one.name: one.times for one in some}, FreePages(pages, PAGE, 256))
    held = {**found.prefix_bytes, **{one.name: one.nbytes for one in some if one.name in found.whole}}
    got_s = added_s(some, [held.get(one.name, 0) for one in some])
    lost_bytes = 128 * ROW + 2 * PAGE
    lost_s = sum(one.stretches[0][1] * min(lost_bytes, one.nbytes) for one in some if one.stretches)
    assert got_s <= exact_s(some, pages * PAGE) + lost_s + 1e-6


def test_the_gain_over_equal_parts_is_real() -> None:
    """One product is bound by its arithmetic, so that half of it may lie on the host for nothing; another is not."""
    bound = SplittableWeight("mlp", 4000, 250, PAGE, [(4.0, 8.0)])
    unbound = SplittableWeight("qkv", 4000, 250, PAGE, [(0.0, 8.0)])
    found = best_parts([bound, unbound], 6000)
    assert found == pytest.approx([2000, 4000]) and added_s([bound, unbound], found) == pytest.approx(0)
    assert added_s([bound, unbound], [3000, 3000]) == pytest.approx(2)


def test_of_what_saves_the_same_each_gets_the_same_part() -> None:
    some = [SplittableWeight(name, nbytes, 250, PAGE, [(0.0, nbytes)]) for name, nbytes in (("x", 4000), ("y", 1000))]
    assert best_parts(some, 2500) == pytest.approx([2000, 500])
    assert best_parts(some, 9000) == pytest.approx([4000, 1000]) and best_parts(some, 0) == [0, 0]
