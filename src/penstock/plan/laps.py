"""A ring in the order of the copies. Each stay takes the pages after those of the stay before it, lap after lap.

A page is free again when the stay that had it a lap ago has been read, so a copy runs as far ahead as the ring is
large, page by page: the first pages of a weight may be on their way while the kernels before it still hold the rest.
Where copies take longer than kernels, a ring of the largest tail and a little more keeps the link busy; the ring of the
floor holds two steps and the next copy whatever the kernels take.

Addresses are fixed, so every run begins at the first page of the ring. What is missing to a whole lap at the end of a
run is lost to the copies that cross it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.plan.stays import LaidStay, MethodArcs, Part

# A copy below this is held back for the pages after it, if it is also a small part of its stay.
PART_BYTES = 4 * 2**20
PART_OF_STAY = 8


def lay_in_laps(
    method: MethodArcs, tails: Mapping[str, int], ring_pages: int, page_bytes: int
) -> tuple[LaidStay, ...] | None:
    """Pages and parts of every stay; None where a page would be needed before it is free."""
    count = method.step_count
    taken = 0
    pages_of: list[range] = []
    for arc in method.arcs:
        if tails[arc.weight] > ring_pages:
            return None
        pages_of.append(range(taken, taken + tails[arc.weight]))
        taken += tails[arc.weight]
    # By ring page: the step at which the last reader of its content ends, counted from the run looked at. In the first
    # round that is the run before; what the second finds is the steady state.
    ended = [-count] * ring_pages
    laid: list[LaidStay] = []
    for run in (0, 1):
        for arc, sequence in zip(method.arcs, pages_of, strict=True):
            pages = [number % ring_pages for number in sequence]
            if run:
                blocked = [ended[page] for page in pages]
                if max(blocked) >= arc.first_step:
                    return None
                laid.append(LaidStay(tuple(pages), _parts(blocked, page_bytes)))
            for page in pages:
                ended[page] = arc.end_step
        ended = [step - count for step in ended] if not run else ended
    return tuple(laid)


def lost_pages(method: MethodArcs, tails: Mapping[str, int], ring_pages: int) -> int:
    """What is missing to a whole lap at the end of a run."""
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
