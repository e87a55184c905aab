"""Weights that are left in the ring until they are read again, by the distance of their next use.

Keeping a weight through the gap between two of its live ranges saves a copy, and costs its pages until the gap ends. If
there are not enough pages for all gaps, those that end furthest ahead are dropped first (Belady's rule: along a line,
with weights of equal size, nothing streams less). A weight that is kept through all of its gaps never leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from penstock.plan.live_ranges import MethodRanges, gaps, join
from penstock.plan.ring import loads
from penstock.plan.tuning import MANY_ACCESSES

# Ranks gaps by their ends, lengths and pages: the highest is dropped first. The second rule is for sizes that differ.
Rule = Callable[[int, int, int], int]
RULES: tuple[Rule, ...] = (lambda end, length, pages: end, lambda end, length, pages: length * pages)


def keep(method: MethodRanges, pages: Mapping[str, int], room_pages: int, rule: Rule) -> MethodRanges | None:
    """The same accesses in fewer stays, whose load is at most `room_pages`; None if the load is larger already."""
    count = method.step_count
    load = loads(method, pages)
    if max(load, default=0) > room_pages:
        return None
    size = [pages[live.weight] for live in method.live_ranges]
    by_length = sorted(gaps(method), key=lambda gap: gap.step_count)
    begins: list[list[tuple[int, int]]] = [[] for _ in load]
    for live, begin, length in by_length:
        begins[begin % count].append((live, length))
    # By gap that is still kept: until which step. The run is walked twice, since what is kept across its end is there
    # when it begins. The second walk takes nothing new.
    kept: dict[int, int] = {}
    kept_pages = 0
    heap: list[tuple[int, int, int]] = []
    ends: list[list[int]] = [[] for _ in range(3 * count)]
    for step in range(2 * count):
        for live, length in begins[step % count]:
            if step < count or live in kept:
                end = kept[live] = step + length - 1
                heappush(heap, (-rule(end, length, size[live]), live, end))
                ends[end].append(live)
                kept_pages += size[live]
        while load[step % count] + kept_pages > room_pages:
            _, live, end = heappop(heap)
            if kept.get(live) == end:
                del kept[live]
                kept_pages -= size[live]
        kept_pages -= sum([size[live] for live in ends[step] if kept.get(live) == step])
    if len(by_length) <= MANY_ACCESSES:
        # Keep what fits after all, the shortest first.
        steps = {live: [step % count for step in range(begin, begin + length)] for live, begin, length in by_length}
        for live in kept:
            for step in steps[live]:
                load[step] += size[live]
        for live, _, _ in by_length:
            if live not in kept and all(load[step] + size[live] <= room_pages for step in steps[live]):
                kept[live] = 0
                for step in steps[live]:
                    load[step] += size[live]
    return join(method, frozenset(kept))
