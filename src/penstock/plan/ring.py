"""Ring pages for arcs: how many are needed at once, and which stay gets which.

A stay may have any pages (each range maps its own), so along a line the largest load is always enough. On a cycle the
stays that cross the place where it is cut hold their pages at both ends of the line, and this can cost more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from penstock.plan.stays import Extent, LaidStay, MethodArcs, Part
from penstock.plan.tuning import ARCS_TIMES_CUTS, CUTS_AT_LEAST, CUTS_AT_MOST


@dataclass(frozen=True)
class Colouring:
    """Ring pages in use, and per arc the extents (first page, number of pages) it holds."""

    page_count: int
    extents: tuple[tuple[Extent, ...], ...]


def loads(method: MethodArcs, pages: Mapping[str, int]) -> list[int]:
    """By step: pages held by the arcs that cover it. A weight that `pages` does not name holds none."""
    return _loads(method.step_count, ((arc.begin_step, arc.end_step, pages.get(arc.weight, 0)) for arc in method.arcs))


def _loads(count: int, holders: Iterable[tuple[int, int, int]]) -> list[int]:
    change = [0] * (count + 1)
    for begin_step, end_step, held in holders:
        begin, end = begin_step % count, end_step % count
        change[begin] += held
        change[end + 1] -= held
        if begin > end:
            change[0] += held
    return list(accumulate(change[:count]))


def peak_load(method: MethodArcs, pages: Mapping[str, int]) -> int:
    return max(loads(method, pages), default=0)


def reading_load(method: MethodArcs, pages: Mapping[str, int]) -> int:
    """The most pages that one step finds in place: between first and last reader, without any copy ahead."""
    reading = ((arc.first_step, arc.end_step, pages.get(arc.weight, 0)) for arc in method.arcs)
    return max(_loads(method.step_count, reading), default=0)


def most_pages(method: MethodArcs, pages: Mapping[str, int]) -> int:
    """No colouring takes more: what crosses the best cut has pages of its own, and the rest is along a line."""
    by_step = loads(method, pages)
    crossing = min((min(by_step[step - 1], by_step[step]) for step in range(len(by_step))), default=0)
    return max(by_step, default=0) + crossing


def colour(method: MethodArcs, pages: Mapping[str, int], *, enough_pages: int = 0) -> Colouring:
    """Pages for every arc, as few as the best of several cuts gives, or the first that takes at most `enough_pages`."""
    if not method.arcs:
        return Colouring(0, ())
    by_step = loads(method, pages)
    enough_pages = max(enough_pages, *by_step)
    # A cut before step s is crossed by the arcs that cover both s - 1 and s.
    crossing = [min(by_step[step - 1], by_step[step]) for step in range(method.step_count)]
    cuts = sorted(range(method.step_count), key=lambda step: (crossing[step], step))
    tries = min(max(ARCS_TIMES_CUTS // len(method.arcs), CUTS_AT_LEAST), CUTS_AT_MOST)
    best: Colouring | None = None
    for cut in cuts[:tries]:
        coloured = _colour_from(method, pages, cut, None if best is None else best.page_count)
        if coloured is not None:
            best = coloured
            if best.page_count <= enough_pages:
                break
    assert best is not None
    return best


def shrink(held: Sequence[Sequence[Extent]], pages: Sequence[int]) -> Colouring:
    """Each holder keeps the first so many of its pages. Pages that nobody keeps are gone, and the rest renumbered."""
    kept: list[list[Extent]] = []
    used: set[int] = set()
    for extents, count in zip(held, pages, strict=True):
        mine: list[Extent] = []
        for first, length in extents:
            taken = min(length, count)
            if taken:
                mine.append((first, taken))
                used.update(range(first, first + taken))
            count -= taken
        kept.append(mine)
    number = {page: index for index, page in enumerate(sorted(used))}
    # The pages of an extent are all kept, so they still follow one another.
    return Colouring(len(number), tuple(tuple((number[first], length) for first, length in mine) for mine in kept))


def _colour_from(method: MethodArcs, pages: Mapping[str, int], cut: int, below_pages: int | None) -> Colouring | None:
    """None as soon as it takes no fewer than `below_pages`."""
    count = method.step_count
    extents: list[list[Extent]] = [[] for _ in method.arcs]
    page_count = 0
    # Pages that come free, with the last step until which they are: that of the line's end, or of their crossing stay.
    releases: list[tuple[int, int, list[Extent]]] = []
    waiting: list[tuple[int, int, int]] = []
    for index, arc in enumerate(method.arcs):
        begin = (arc.begin_step - cut) % count
        end = begin + arc.end_step - arc.begin_step
        held = pages[arc.weight]
        if end < count:
            waiting.append((begin, -end, index))
        else:
            extents[index].append((page_count, held))
            heappush(releases, (end - count, begin - 1, extents[index]))
            page_count += held
    # Free pages by that step; and the steps for which there are some, in order.
    free: defaultdict[int, deque[Extent]] = defaultdict(deque)
    deadlines: list[int] = []

    for begin, negative_end, index in sorted(waiting):
        end = -negative_end
        while releases and releases[0][0] < begin:
            _, deadline, released = heappop(releases)
            if not free[deadline]:
                insort(deadlines, deadline)
            free[deadline].extend(released)
        needed = pages[method.arcs[index].weight]
        # Best fit: the pages that are wanted back soonest, of those that are free long enough; of these the ones whose
        # last readers ended longest ago.
        fit = bisect_left(deadlines, end)
        while needed:
            found: list[Extent] = []
            if fit == len(deadlines):
                deadline = count - 1
                found.append((page_count, needed))
                page_count += needed
                needed = 0
                if below_pages is not None and page_count >= below_pages:
                    return None
            else:
                deadline = deadlines[fit]
                pool = free[deadline]
                while needed and pool:
                    first, length = pool.popleft()
                    if length > needed:
                        pool.appendleft((first + needed, length - needed))
                        length = needed
                    needed -= length
                    found.append((first, length))
                if not pool:
                    del deadlines[fit]
            found = _merged(found)
            extents[index] += found
            heappush(releases, (end, deadline, found))
    if below_pages is not None and page_count >= below_pages:
        return None
    return Colouring(page_count, tuple(map(tuple, extents)))


def _merged(extents: list[Extent]) -> list[Extent]:
    """The same pages in as few extents as can be: what was torn apart would be handed on in ever smaller pieces."""
    if len(extents) == 1:
        return extents
    extents.sort()
    merged = extents[:1]
    for first, length in extents[1:]:
        last_first, last_length = merged[-1]
        if last_first + last_length == first:
            merged[-1] = (last_first, last_length + length)
        else:
            merged.append((first, length))
    return merged


def lay_coloured(method: MethodArcs, coloured: Colouring) -> tuple[LaidStay, ...]:
    """Each stay in one part, which waits for the last reader of anything its pages held before.

    A stay that has a page to itself finds its own copy of the run before there, and waits for its own last reader.
    """
    count = method.step_count
    arcs, extents_of = method.arcs, coloured.extents
    blocked = [0] * len(arcs)
    ended = [0] * coloured.page_count
    order = sorted(range(len(arcs)), key=[arc.begin_step % count for arc in arcs].__getitem__)
    # The first round only leaves the ends; the second finds them all, a run later.
    for run in (0, 1):
        for index in order:
            arc = arcs[index]
            shift = (run - arc.begin_step // count) * count
            until = -count
            for first, length in extents_of[index]:
                if length == 1:
                    until = max(until, ended[first])
                    ended[first] = arc.end_step + shift
                else:
                    until = max(until, *ended[first : first + length])
                    ended[first : first + length] = [arc.end_step + shift] * length
            blocked[index] = until - shift
    return tuple(
        LaidStay(extents, (Part(0, sum(length for _, length in extents), arc.begin_step, until),))
        for arc, extents, until in zip(arcs, extents_of, blocked, strict=True)
    )
