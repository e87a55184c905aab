"""Ring pages for arcs: how many are needed at once, and which stay gets which.

A stay may have any pages (each range maps its own), so along a line the largest load is always enough. On a cycle the
stays that cross the place where it is cut hold their pages at both ends of the line, and this can cost more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, islice

from penstock.plan.stays import LaidStay, MethodArcs, Part

# Where to cut the cycle is a guess; several are tried, those with the least load first. More where it costs little.
CUTS_AT_LEAST, CUTS_AT_MOST = 8, 64
ARCS_TIMES_CUTS = 8192

Extent = tuple[int, int]


@dataclass(frozen=True)
class Colouring:
    """Ring pages in use, and per arc the extents (first page, number of pages) it holds."""

    page_count: int
    extents: tuple[tuple[Extent, ...], ...]


def loads(method: MethodArcs, pages: Mapping[str, int]) -> list[int]:
    """By step: pages held by the arcs that cover it. A weight that `pages` does not name holds none."""
    count = method.step_count
    change = [0] * (count + 1)
    for arc in method.arcs:
        held = pages.get(arc.weight, 0)
        begin, end = arc.begin_step % count, arc.end_step % count
        change[begin] += held
        change[end + 1] -= held
        if begin > end:
            change[0] += held
    return list(accumulate(change[:count]))


def peak_load(method: MethodArcs, pages: Mapping[str, int]) -> int:
    return max(loads(method, pages), default=0)


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
    kept: list[list[int]] = []
    for extents, count in zip(held, pages, strict=True):
        all_pages = (page for first, length in extents for page in range(first, first + length))
        kept.append(list(islice(all_pages, count)))
    number = {page: index for index, page in enumerate(sorted({page for some in kept for page in some}))}
    return Colouring(len(number), tuple(tuple((number[page], 1) for page in some) for some in kept))


def _colour_from(method: MethodArcs, pages: Mapping[str, int], cut: int, below_pages: int | None) -> Colouring | None:
    """None as soon as it takes no fewer than `below_pages`."""
    count = method.step_count
    extents: list[list[Extent]] = [[] for _ in method.arcs]
    page_count = 0
    # Pages that come free, with the last step until which they are: that of the line's end, or of their crossing stay.
    releases: list[tuple[int, int, Extent]] = []
    waiting: list[tuple[int, int, int]] = []
    for index, arc in enumerate(method.arcs):
        begin = (arc.begin_step - cut) % count
        end = begin + arc.end_step - arc.begin_step
        held = pages[arc.weight]
        if end < count:
            waiting.append((begin, -end, index))
        else:
            extent = (page_count, held)
            page_count += held
            extents[index].append(extent)
            heappush(releases, (end - count, begin - 1, extent))
    # Free pages by that step; and the steps for which there are some, in order.
    free: defaultdict[int, deque[Extent]] = defaultdict(deque)
    deadlines: list[int] = []

    for begin, negative_end, index in sorted(waiting):
        end = -negative_end
        while releases and releases[0][0] < begin:
            _, deadline, extent = heappop(releases)
            if not free[deadline]:
                insort(deadlines, deadline)
            free[deadline].append(extent)
        needed = pages[method.arcs[index].weight]
        # Best fit: the pages that are wanted back soonest, of those that are free long enough; of these the ones whose
        # last readers ended longest ago.
        fit = bisect_left(deadlines, end)
        while needed and fit < len(deadlines):
            deadline = deadlines[fit]
            pool = free[deadline]
            first, length = pool.popleft()
            taken = min(length, needed)
            if taken < length:
                pool.appendleft((first + taken, length - taken))
            elif not pool:
                del deadlines[fit]
            needed -= taken
            extents[index].append((first, taken))
            heappush(releases, (end, deadline, (first, taken)))
        if needed:
            extents[index].append((page_count, needed))
            heappush(releases, (end, count - 1, (page_count, needed)))
            page_count += needed
            if below_pages is not None and page_count >= below_pages:
                return None
    if below_pages is not None and page_count >= below_pages:
        return None
    return Colouring(page_count, tuple(map(tuple, extents)))


def reading_load(method: MethodArcs, pages: Mapping[str, int]) -> int:
    """The most pages that one step finds in place: between first and last reader, without any copy ahead."""
    return peak_load(replace(method, arcs=tuple(replace(arc, begin_step=arc.first_step) for arc in method.arcs)), pages)


def lay_coloured(method: MethodArcs, coloured: Colouring) -> tuple[LaidStay, ...]:
    """Each stay in one part, which waits for the last reader of anything its pages held before.

    A stay that has a page to itself finds its own copy of the run before there, and waits for its own last reader.
    """
    count = method.step_count
    pages_of = [
        tuple(page for first, length in extents for page in range(first, first + length))
        for extents in coloured.extents
    ]
    blocked = [0] * len(method.arcs)
    ended = [0] * coloured.page_count
    order = sorted(range(len(method.arcs)), key=lambda index: method.arcs[index].begin_step % count)
    # The first round only leaves the ends; the second finds them all, a run later.
    for run in (0, 1):
        for index in order:
            arc = method.arcs[index]
            runs_later = run - arc.begin_step // count
            blocked[index] = max(ended[page] for page in pages_of[index]) - runs_later * count
            for page in pages_of[index]:
                ended[page] = arc.end_step + runs_later * count
    return tuple(
        LaidStay(pages, (Part(0, len(pages), arc.begin_step, until),))
        for arc, pages, until in zip(method.arcs, pages_of, blocked, strict=True)
    )
