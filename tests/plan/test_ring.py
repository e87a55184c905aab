from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.ring import Colouring, colour, loads, peak_load, shrink
from penstock.plan.stays import Arc, MethodArcs, look_ahead, method_arcs
from tests.plan.test_floor import chain


def cycle(step_count: int, *arcs: tuple[int, int, int]) -> tuple[MethodArcs, dict[str, int]]:
    """Arcs as (begin, length, pages)."""
    made = [
        Arc(f"w{index}", (index,), begin, begin, begin + length - 1) for index, (begin, length, _) in enumerate(arcs)
    ]
    return MethodArcs(step_count, tuple(made), frozenset()), {f"w{index}": arc[2] for index, arc in enumerate(arcs)}


def holders(method: MethodArcs, coloured: Colouring) -> dict[tuple[int, int], list[str]]:
    """(step, page) -> who holds it."""
    held: dict[tuple[int, int], list[str]] = {}
    for arc, extents in zip(method.arcs, coloured.extents, strict=True):
        for step in range(arc.begin_step, arc.end_step + 1):
            for first, length in extents:
                for page in range(first, first + length):
                    held.setdefault((step % method.step_count, page), []).append(arc.weight)
    return held


def fewest_pages(method: MethodArcs, pages: dict[str, int]) -> int:
    """The true optimum, by trying: arcs cut into single pages, one colour after the other."""
    units = [arc for arc in method.arcs for _ in range(pages[arc.weight])]
    steps = [{step % method.step_count for step in range(arc.begin_step, arc.end_step + 1)} for arc in units]

    def fits(limit: int) -> bool:
        used: list[list[set[int]]] = [[] for _ in range(limit)]

        def place(index: int) -> bool:
            if index == len(units):
                return True
            for one in used:
                if all(steps[index].isdisjoint(other) for other in one):
                    one.append(steps[index])
                    if place(index + 1):
                        return True
                    one.pop()
                    # Empty colours are alike: if one does not do, none does.
                    if not one:
                        return False
            return False

        return place(0)

    limit = peak_load(method, pages)
    while not fits(limit):
        limit += 1
    return limit


ARCS = st.integers(3, 8).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(1, count - 1), st.integers(1, 2)), max_size=6),
    )
)


@settings(max_examples=300, deadline=None)
@given(ARCS)
def test_no_page_has_two_holders_and_every_arc_has_its_pages(case: tuple[int, list[tuple[int, int, int]]]) -> None:
    method, pages = cycle(case[0], *case[1])
    coloured = colour(method, pages)
    assert all(len(names) == 1 for names in holders(method, coloured).values())
    for arc, extents in zip(method.arcs, coloured.extents, strict=True):
        assert sum(length for _, length in extents) == pages[arc.weight]
    assert coloured.page_count == 1 + max((page for _, page in holders(method, coloured)), default=-1)


def test_seldom_and_little_above_the_optimum() -> None:
    """All cases of up to four single-page arcs in a cycle of five steps: never more than one page above the optimum."""
    kinds = [(begin, length, 1) for begin in range(5) for length in (1, 2, 3, 4)]
    above = total = 0
    for a in range(len(kinds)):
        for b in range(a, len(kinds)):
            for c in range(b, len(kinds), 3):
                for d in range(c, len(kinds), 3):
                    method, pages = cycle(5, kinds[a], kinds[b], kinds[c], kinds[d])
                    excess = colour(method, pages).page_count - fewest_pages(method, pages)
                    assert excess in (0, 1)
                    above += excess
                    total += 1
    assert total > 1_000 and above == 0, (above, total)


@settings(max_examples=150, deadline=None)
@given(ARCS)
def test_never_below_the_optimum_and_at_most_a_third_above(case: tuple[int, list[tuple[int, int, int]]]) -> None:
    method, pages = cycle(case[0], *case[1])
    fewest = fewest_pages(method, pages)
    assert fewest <= colour(method, pages).page_count <= fewest + fewest // 3 + 1


@settings(max_examples=150, deadline=None)
@given(ARCS)
def test_where_nothing_crosses_the_cut_the_load_is_enough(case: tuple[int, list[tuple[int, int, int]]]) -> None:
    count, arcs = case
    method, pages = cycle(count, *((begin, min(length, count - begin), held) for begin, length, held in arcs))
    assert colour(method, pages).page_count == peak_load(method, pages)


def test_loads_wrap() -> None:
    method, pages = cycle(4, (3, 2, 5), (0, 1, 7), (-1, 3, 11))
    assert loads(method, pages) == [5 + 7 + 11, 11, 0, 5 + 11]
    assert loads(method, {"w1": 7}) == [7, 0, 0, 0]


def test_the_first_cut_that_is_good_enough_is_taken() -> None:
    method, pages = cycle(5, (0, 3, 1), (1, 3, 1), (2, 3, 1), (3, 3, 1), (4, 3, 1))
    assert colour(method, pages).page_count == colour(method, pages, enough_pages=9).page_count == 5


def test_pages_given_back_leave_no_gaps() -> None:
    before = [[(0, 2), (6, 1)], [(2, 3)], [(5, 1)]]
    assert shrink(before, [1, 2, 1]) == Colouring(4, (((0, 1),), ((1, 2),), ((3, 1),)))


# ---- arcs


def arcs_of(*steps: str) -> dict[tuple[int, ...], tuple[int, int]]:
    names = frozenset(name for step in steps for name in step.split())
    return {arc.positions: (arc.begin_step, arc.end_step) for arc in method_arcs(chain(*steps), names).arcs}


def test_only_the_first_of_a_step_is_the_next_copy() -> None:
    arcs = arcs_of("a", "b", "c d", "e", "f", "g")
    assert arcs[(2,)] == (0, 2) and arcs[(3,)] == (1, 2)
    assert arcs[(0,)] == (-2, 0)


def test_neighbouring_accesses_make_one_arc_and_distant_ones_two() -> None:
    arcs = arcs_of("a", "b", "a", "c", "d", "e", "f", "g", "a", "h", "i", "j", "k")
    assert arcs[(0, 2)] == (-2, 2) and arcs[(8,)] == (6, 8)


def test_an_arc_across_the_end_of_the_run_has_its_accesses_in_the_order_of_time() -> None:
    arcs = arcs_of("a", "b", "c", "d", "e", "f", "a")
    assert arcs[(6, 0)] == (4, 7)


@pytest.mark.parametrize("steps", [("a",), ("a", "b"), ("a", "b", "a", "c", "a", "d")])
def test_what_would_never_leave_is_no_arc(steps: tuple[str, ...]) -> None:
    method = method_arcs(chain(*steps), frozenset("abcd"))
    assert "a" in method.always and all(arc.weight != "a" for arc in method.arcs)


def test_lookahead_counts_the_pages_beyond_the_next_step() -> None:
    names = [f"w{index}" for index in range(20)]
    method = method_arcs(chain(*names), frozenset(names))
    pages = dict.fromkeys(names, 2)
    assert [arc.begin_step for arc in look_ahead(method, pages, 2).arcs] == [index - 2 for index in range(20)]
    assert [arc.begin_step for arc in look_ahead(method, pages, 7).arcs] == [index - 4 for index in range(20)]
    # Half a run at most.
    assert [arc.begin_step for arc in look_ahead(method, pages, 1000).arcs] == [index - 10 for index in range(20)]
    assert look_ahead(method, pages, 0) == method


def test_lookahead_stops_at_the_previous_stay_of_the_same_weight() -> None:
    steps = ["a", "b", "c", "d", "e", "f", "a", *(f"w{index}" for index in range(20))]
    method = method_arcs(chain(*steps), frozenset(steps))
    far = {arc.positions: arc for arc in look_ahead(method, dict.fromkeys(steps, 1), 1000).arcs}
    assert far[(0,)].end_step == 0 and far[(6,)].begin_step == 1
