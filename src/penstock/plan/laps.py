"""A ring in the order of the copies. Each stay takes the pages after those of the stay before it, lap after lap.

A page is free again when the stay that had it a lap ago has been read, so a copy runs as far ahead as the ring is
large, page by page: the first pages of a weight may be on their way while the kernels before it still hold the rest.
Where copies take longer than kernels, a ring of the largest tail and a little more keeps the link busy; the ring of the
floor holds two steps and the next copy whatever the kernels take.

Addresses are fixed, so every run has its stays on the same pages, and somewhere in it the first lap begins anew: at
the cut. What is missing there to a whole lap is lost to the copies that cross it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from penstock.plan.demand import Demand
from penstock.plan.stays import Extent, LaidStay, MethodArcs, Part
from penstock.plan.tuning import PART_BYTES, PART_OF_STAY


def lay_in_laps(
    method: MethodArcs,
    tails: Mapping[str, int],
    ring_pages: int,
    demand: Demand,
    *,
    cut: int = 0,
    slot_pages: int = 1,
) -> tuple[LaidStay, ...] | None:
    """Pages and parts of every stay, the first lap beginning with arc `cut`; None where a page would be needed before
    it is free.

    Stays begin at multiples of `slot_pages`: with slots as long as the longest tail, each takes over the place of one
    other and is copied in one part.
    """
    count = method.step_count
    order = [*range(cut, len(method.arcs)), *range(cut)]
    # In the order of the laps: pages taken, and the step at which they are free, counted from one run.
    sizes = [-(-tails[method.arcs[index].weight] // slot_pages) * slot_pages for index in order]
    ends = [method.arcs[index].end_step + (count if index < cut else 0) for index in order]
    if max(sizes, default=0) > ring_pages:
        return None
    # Taken from the front as laps go on: what the run before left in the ring, page 0 first, and then this run's own.
    left = _left_behind(sizes, ring_pages)
    held = [pages for _, pages in left] + sizes
    ended = [ends[turn] - count for turn, _ in left] + ends
    front = 0
    front_pages = held[0] if held else 0
    taken = 0
    laid: dict[int, LaidStay] = {}
    for turn, index in enumerate(order):
        arc = method.arcs[index]
        shift = count if index < cut else 0
        pages, size = tails[arc.weight], sizes[turn]
        spans: list[tuple[int, int]] = []
        passed = 0
        while passed < size:
            if not front_pages:
                front += 1
                front_pages = held[front]
            length = min(front_pages, size - passed)
            if passed < pages:
                until = ended[front] - shift
                if until >= arc.first_step:
                    return None
                spans.append((min(length, pages - passed), until))
            front_pages -= length
            passed += length
        laid[index] = LaidStay(_extents(taken, pages, ring_pages), _parts(spans, pages, arc.weight, demand))
        taken = (taken + size) % ring_pages
    return tuple(laid[index] for index in range(len(method.arcs)))


def lost_pages(method: MethodArcs, tails: Mapping[str, int], ring_pages: int) -> int:
    """What is missing to a whole lap at the cut."""
    return -sum([tails[arc.weight] for arc in method.arcs]) % ring_pages


def _left_behind(sizes: Sequence[int], ring_pages: int) -> list[tuple[int, int]]:
    """Who holds the ring when a run has ended, from its first page on: (turn, pages). No more than are ever taken."""
    begins = [0, *accumulate(sizes)]
    total = begins[-1]
    last_lap = total - total % ring_pages
    return [*_holders(begins, last_lap, total), *_holders(begins, max(0, total - ring_pages), last_lap)]


def _holders(begins: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int]]:
    if low >= high:
        return
    for turn in range(bisect_right(begins, low) - 1, len(begins) - 1):
        begin, end = max(begins[turn], low), min(begins[turn + 1], high)
        if begin >= high:
            return
        if begin < end:
            yield turn, end - begin


def _extents(first: int, pages: int, ring_pages: int) -> tuple[Extent, ...]:
    if first + pages <= ring_pages:
        return ((first, pages),)
    return ((first, ring_pages - first), (0, first + pages - ring_pages))


def _parts(spans: Sequence[tuple[int, int]], pages: int, name: str, demand: Demand) -> tuple[Part, ...]:
    """Neighbouring pages that are free at the same time are copied together; so is what would be too little alone.

    `spans` are pages and the step until which they are blocked.
    """
    if len(spans) == 1:
        return (Part(0, pages, spans[0][1] + 1, spans[0][1]),)
    least_pages = max(1, min(PART_BYTES // demand.page_bytes, pages // PART_OF_STAY))
    # First page of each part, and the end.
    bounds = [0]
    page = 0
    for (length, until), (_, following) in pairwise(spans):
        page += length
        if following != until and page - bounds[-1] >= least_pages:
            bounds.append(page)
    last_pages = pages - bounds[-1]
    small = last_pages == 1 and demand.last_page_bytes[name] < demand.small_copy_bytes
    if len(bounds) > 1 and (small or last_pages < least_pages):
        bounds.pop()
    bounds.append(pages)
    # Bounds lie between spans, so each span is in one part.
    blocked: list[list[int]] = [[] for _ in bounds[1:]]
    page = part = 0
    for length, until in spans:
        part += page >= bounds[part + 1]
        blocked[part].append(until)
        page += length
    return tuple(
        Part(first, end - first, max(untils) + 1, max(untils))
        for (first, end), untils in zip(pairwise(bounds), blocked, strict=True)
    )
