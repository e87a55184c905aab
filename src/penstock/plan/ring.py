"""Ring pages for live ranges: how many are needed at once, and which range gets which.

A range may have any pages (each range maps them at addresses of its own), so along a line the largest load is always
enough. Each range takes the pages whose last readers ended longest ago. So its copy may begin as early as the length of
the ring allows, page by page: the first pages of a weight are on their way while kernels before it still hold the rest.

Addresses are fixed, so every run has its ranges on the same pages. The cycle of runs is cut somewhere: there the first
pages are taken anew, and copies that cross the cut find less ahead of them. Ranges that cross it hold their pages at
both ends of the line, which can cost more pages than the load.

A range that `leads` has its pages from the beginning of its live range on, so its copy overlaps with the step before,
however long that takes. The floor is laid this way. Other ranges have their pages from their first reader on, and are
copied earlier as far as there is room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from penstock.plan.live_ranges import LiveRange, MethodRanges
from penstock.plan.tuning import CUTS_AT_LEAST, CUTS_AT_MOST, PART_BYTES, PART_OF_STAY, RANGES_TIMES_CUTS

# Consecutive pages: the first, and how many.
Extent = tuple[int, int]
# An extent, and the last step on the line that read its pages; None if that was before the line begins.
_Span = tuple[int, int, int | None]


class Part(NamedTuple):
    """Pages of a stay that are copied together, counted from the first that streams."""

    first_page: int
    page_count: int
    # The step of the last reader of what the pages held before; the copy is issued behind it. It counts from the run of
    # the stay's first access, and is negative in the run before.
    blocked_until: int


@dataclass(frozen=True)
class Ring:
    """The pages of one method's ranges."""

    page_count: int
    # By live range, in the order of its bytes: the first page, how many, and the last step that reads what was there.
    spans: tuple[tuple[tuple[int, int, int], ...], ...]


def _begin(live: LiveRange, leads: bool) -> int:
    return live.begin_step if leads else live.first_step


def loads(method: MethodRanges, pages: Mapping[str, int], *, leads: bool = True) -> list[int]:
    """By step: pages held by the live ranges that cover it. A weight that `pages` does not name holds none."""
    count = method.step_count
    change = [0] * (count + 1)
    for live in method.live_ranges:
        held = pages.get(live.weight, 0)
        begin, end = _begin(live, leads) % count, live.end_step % count
        change[begin] += held
        change[end + 1] -= held
        if begin > end:
            change[0] += held
    return list(accumulate(change[:count]))


def peak_load(methods: Iterable[MethodRanges], pages: Mapping[str, int], *, leads: bool = True) -> int:
    """The largest load of any method: methods take turns with the ring."""
    return max((max(loads(method, pages, leads=leads), default=0) for method in methods), default=0)


def most_pages(method: MethodRanges, pages: Mapping[str, int]) -> int:
    """An upper bound on any ring: ranges across the best cut have pages of their own, and the rest lie along a line."""
    by_step = loads(method, pages)
    return max(by_step, default=0) + min(_crossing(by_step), default=0)


def _crossing(by_step: Sequence[int]) -> list[int]:
    """By step: an upper bound on the pages that cross a cut before it, since they cover the step before too."""
    return [min(by_step[step - 1], by_step[step]) for step in range(len(by_step))]


def least_crossed(method: MethodRanges, pages: Mapping[str, int]) -> int:
    """The cut that the fewest pages cross, for ranges that do not lead."""
    crossing = _crossing(loads(method, pages, leads=False))
    return crossing.index(min(crossing)) if crossing else 0


def shortest(method: MethodRanges, pages: Mapping[str, int], *, enough_pages: int = 0) -> tuple[int, int]:
    """The fewest pages that the best of several cuts needs when ranges lead, and that cut; or the first cut that needs
    at most `enough_pages`."""
    if not method.live_ranges:
        return 0, 0
    by_step = loads(method, pages)
    crossing = _crossing(by_step)
    cuts = sorted(range(method.step_count), key=lambda step: (crossing[step], step))
    tries = min(max(RANGES_TIMES_CUTS // len(method.live_ranges), CUTS_AT_LEAST), CUTS_AT_MOST)
    best: tuple[int, int] | None = None
    for cut in cuts[:tries]:
        ring = allocate(method, pages, cut, below_pages=None if best is None else best[0], leads=True)
        if ring is not None:
            best = ring.page_count, cut
            if ring.page_count <= max(enough_pages, *by_step):
                break
    assert best is not None
    return best


def allocate(
    method: MethodRanges,
    pages: Mapping[str, int],
    cut: int,
    *,
    leads: bool,
    ring_pages: int | None = None,
    below_pages: int | None = None,
) -> Ring | None:
    """Pages for every range, on a line that begins with step `cut`; None if `ring_pages` are too few.

    Without `ring_pages` the ring grows as needed; None as soon as it takes `below_pages` or more.
    """
    count = method.step_count
    spans: list[list[_Span]] = [[] for _ in method.live_ranges]
    # Pages that become free: after which step, and through which step they stay so: to the end of the line, or until
    # the range that crosses the cut needs them again.
    releases: list[tuple[int, int, list[Extent]]] = []
    waiting: list[tuple[int, int, int]] = []
    page_count = 0
    for index, live in enumerate(method.live_ranges):
        own = _begin(live, leads)
        begin = (own - cut) % count
        end = begin + live.end_step - own
        if end < count:
            waiting.append((begin, -end, index))
        else:
            held = pages[live.weight]
            heappush(releases, (end - count, begin - 1, [(page_count, held)]))
            spans[index].append((page_count, held, None))
            page_count += held
    # Free pages by that last step, those read longest ago first; and the steps that have any, sorted.
    free: defaultdict[int, deque[_Span]] = defaultdict(deque)
    deadlines: list[int] = []
    if ring_pages is not None:
        if page_count > ring_pages:
            return None
        if page_count < ring_pages:
            free[count - 1].append((page_count, ring_pages - page_count, None))
            deadlines.append(count - 1)
        page_count = ring_pages

    for begin, negative_end, index in sorted(waiting):
        end = -negative_end
        while releases and releases[0][0] < begin:
            ended, deadline, released = heappop(releases)
            if not free[deadline]:
                insort(deadlines, deadline)
            free[deadline].extend([(first, length, ended) for first, length in released])
        needed = pages[method.live_ranges[index].weight]
        # Best fit: of the pages that are free long enough, those that are wanted back soonest.
        fit = bisect_left(deadlines, end)
        while needed:
            found: list[_Span] = []
            if fit == len(deadlines):
                if ring_pages is not None:
                    return None
                deadline = count - 1
                found.append((page_count, needed, None))
                page_count += needed
                needed = 0
                if below_pages is not None and page_count >= below_pages:
                    return None
            else:
                deadline = deadlines[fit]
                pool = free[deadline]
                while needed and pool:
                    first, length, ended_or_none = pool.popleft()
                    if length > needed:
                        pool.appendleft((first + needed, length - needed, ended_or_none))
                        length = needed
                    needed -= length
                    found.append((first, length, ended_or_none))
                if not pool:
                    del deadlines[fit]
            spans[index] += found
            heappush(releases, (end, deadline, _merged(found)))
    if below_pages is not None and page_count >= below_pages:
        return None
    # Pages that no range had before on the line were last read in the run before, by their last readers on the line.
    last = [(first, length, ended) for pool in free.values() for first, length, ended in pool if ended is not None]
    last += [(first, length, ended) for ended, _, released in releases for first, length in released]
    return Ring(page_count, _resolved(method, spans, cut, sorted(last), leads))


def _resolved(
    method: MethodRanges,
    spans: Sequence[Sequence[_Span]],
    cut: int,
    last: Sequence[tuple[int, int, int]],
    leads: bool,
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Steps on the line, as steps of the run of each range's first access; and who had its pages in the run before."""
    count = method.step_count
    firsts = [first for first, _, _ in last]
    found: list[tuple[tuple[int, int, int], ...]] = []
    for live, mine in zip(method.live_ranges, spans, strict=True):
        own = _begin(live, leads)
        shift = own - (own - cut) % count
        crosses = live.end_step - shift >= count
        resolved: list[tuple[int, int, int]] = []
        for first, length, ended in mine:
            if ended is not None:
                resolved.append((first, length, ended + shift))
                continue
            before = shift if crosses else shift - count
            at = bisect_right(firsts, first) - 1
            while length:
                held_first, held_length, until = last[at]
                taken = min(length, held_first + held_length - first)
                resolved.append((first, taken, until + before))
                first, length, at = first + taken, length - taken, at + 1
        # The pages that become free first hold the first bytes.
        found.append(tuple(sorted(resolved, key=_until)))
    return tuple(found)


def _until(span: tuple[int, int, int]) -> int:
    return span[2]


def _merged(spans: Sequence[_Span]) -> list[Extent]:
    """The same pages in as few extents as possible: otherwise they would be handed on in ever smaller pieces."""
    if len(spans) == 1:
        return [spans[0][:2]]
    merged: list[Extent] = []
    for first, length in sorted([span[:2] for span in spans]):
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((first, length))
    return merged


def parts(spans: Sequence[tuple[int, int, int]], page_bytes: int, *, last_is_small: bool) -> list[Part]:
    """Neighbouring pages that become free at the same time are copied together; so are pages too few to copy alone."""
    pages = sum([length for _, length, _ in spans])
    if len(spans) == 1:
        return [Part(0, pages, spans[0][2])]
    least_pages = max(1, min(PART_BYTES // page_bytes, pages // PART_OF_STAY))
    found: list[Part] = []
    first_page = page = 0
    for index, (_, length, until) in enumerate(spans):
        page += length
        # Spans come in the order in which they become free, so the last one of a part is what blocks it.
        is_last = index == len(spans) - 1
        if is_last or (spans[index + 1][2] != until and page - first_page >= least_pages):
            found.append(Part(first_page, page - first_page, until))
            first_page = page
    last = found[-1]
    if len(found) > 1 and (last.page_count < least_pages or (last.page_count == 1 and last_is_small)):
        found[-2:] = [Part(found[-2].first_page, pages - found[-2].first_page, last.blocked_until)]
    return found
