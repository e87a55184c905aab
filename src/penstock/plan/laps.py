"""A ring in the order of the copies. Each stay takes the pages after those of the stay before it, lap after lap.

A page is free again when the stay that had it a lap ago has been read, so a copy runs as far ahead as the ring is
large, page by page: the first pages of a weight may be on their way while the kernels before it still hold the rest.
Where copies take longer than kernels, a ring of the largest tail and a little more keeps the link busy; the ring of the
floor holds two steps and the next copy whatever the kernels take.

Addresses are fixed, so every run has its stays on the same pages, and somewhere in it the first lap begins anew: at
the cut. What is missing there to a whole lap is lost to the copies that cross it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.plan.stays import LaidStay, MethodArcs, Part

# A copy below this is held back for the pages after it, if it is also a small part of its stay.
PART_BYTES = 4 * 2**20
PART_OF_STAY = 8


def lay_in_laps(
    method: MethodArcs, tails: Mapping[str, int], ring_pages: int, page_bytes: int, cut: int = 0
) -> tuple[LaidStay, ...] | None:
    """Pages and parts of every stay, the first lap beginning with arc `cut`; None where a page would be needed before
    it is free."""
    count = method.step_count
    order = [*range(cut, len(method.arcs)), *range(cut)]
    taken = 0
    pages_of: dict[int, list[int]] = {}
    for index in order:
        pages = tails[method.arcs[index].weight]
        if pages > ring_pages:
            return None
        pages_of[index] = [number % ring_pages for number in range(taken, taken + pages)]
        taken += pages
    # By ring page: the step at which the last reader of its content ends, counted from one run. The first round only
    # leaves the ends; the second, a run later, finds them all.
    ended = [-count] * ring_pages
    laid: dict[int, LaidStay] = {}
    for turn in (0, 1):
        for index in order:
            arc = method.arcs[index]
            shift = (turn + (index < cut)) * count
            if turn:
                blocked = [ended[page] - shift for page in pages_of[index]]
                if max(blocked) >= arc.first_step:
                    return None
                laid[index] = LaidStay(tuple(pages_of[index]), _parts(blocked, page_bytes))
            for page in pages_of[index]:
                ended[page] = arc.end_step + shift
    return tuple(laid[index] for index in range(len(method.arcs)))


def lost_pages(method: MethodArcs, tails: Mapping[str, int], ring_pages: int) -> int:
    """What is missing to a whole lap at the cut."""
    return -sum(tails[arc.weight] for arc in method.arcs) % ring_pages


def _parts(blocked: Sequence[int], page_bytes: int) -> tuple[Part, ...]:
    """Neighbouring pages that are free at the same time are copied together; so is what would be too little alone."""
    least_pages = max(1, min(PART_BYTES // page_bytes, len(blocked) // PART_OF_STAY))
    # First page of each part, and the end.
    bounds = [0]
    for page in range(1, len(blocked)):
        if blocked[page] != blocked[page - 1] and page - bounds[-1] >= least_pages:
            bounds.append(page)
    if len(bounds) > 1 and len(blocked) - bounds[-1] < least_pages:
        bounds.pop()
    bounds.append(len(blocked))
    parts: list[Part] = []
    for first, end in pairwise(bounds):
        until = max(blocked[first:end])
        parts.append(Part(first, end - first, until + 1, until))
    return tuple(parts)
