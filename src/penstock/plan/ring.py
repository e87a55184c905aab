"""Ring pages for live ranges: how many are needed at once, and which range gets which.

A range may have any pages (each has addresses of its own that map them), so along a line the largest load is always
enough. Each range takes the pages whose last readers ended longest ago: so its copy may begin as early as the ring is
large, page by page, and the first pages of a weight are on their way while kernels before it still hold the rest.

Addresses are fixed, so every run has its ranges on the same pages. The cycle of runs is cut somewhere: there the first
pages are taken anew, and copies that cross the cut find less ahead of them. Ranges that cross it hold their pages at
both ends of the line, which can cost more pages than the load.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from penstock.plan.demand import Demand
from penstock.plan.live_ranges import Extent, LaidStay, MethodRanges, Part
from penstock.plan.tuning import CUTS_AT_LEAST, CUTS_AT_MOST, PART_BYTES, PART_OF_STAY, RANGES_TIMES_CUTS

# Pages, from the first on, and the last step at which they were read, on the line; None if that was before its
# beginning.
_Span = tuple[int, int, int | None]


def loads(method: MethodRanges, pages: Mapping[str, int]) -> list[int]:
    """By step: pages held by the live ranges that cover it. A weight that `pages` does not name holds none."""
    return _loads(
        method.step_count, ((live.begin_step, live.end_step, pages.get(live.weight, 0)) for live in method.live_ranges)
    )


def _loads(count: int, holders: Iterable[tuple[int, int, int]]) -> list[int]:
    change = [0] * (count + 1)
    for begin_step, end_step, held in holders:
        begin, end = begin_step % count, end_step % count
        change[begin] += held
        change[end + 1] -= held
        if begin > end:
            change[0] += held
    return list(accumulate(change[:count]))


def peak_load(method: MethodRanges, pages: Mapping[str, int]) -> int:
    return max(loads(method, pages), default=0)


def reading_load(method: MethodRanges, pages: Mapping[str, int]) -> int:
    """The most pages that one step finds in place: between first and last reader, without any copy ahead."""
    reading = ((live.first_step, live.end_step, pages.get(live.weight, 0)) for live in method.live_ranges)
    return max(_loads(method.step_count, reading), default=0)


def most_pages(method: MethodRanges, pages: Mapping[str, int]) -> int:
    """No ring is longer: what crosses the best cut has pages of its own, and the rest is along a line."""
    by_step = loads(method, pages)
    crossing = min((min(by_step[step - 1], by_step[step]) for step in range(len(by_step))), default=0)
    return max(by_step, default=0) + crossing


def lost_pages(method: MethodRanges, suffixes: Mapping[str, int], ring_pages: int) -> int:
    """What is missing at the cut to a whole number of rounds."""
    return -sum([suffixes[live.weight] for live in method.live_ranges]) % ring_pages


@dataclass(frozen=True)
class Ring:
    """The pages of one method's ranges."""

    page_count: int
    # By live range, in the order of its bytes: the first page, how many, and the last step that reads what was there.
    spans: tuple[tuple[tuple[int, int, int], ...], ...]


def lay(
    methods: Sequence[MethodRanges], rings: Sequence[Ring], demand: Demand
) -> tuple[tuple[tuple[LaidStay, ...], ...], int]:
    """By method: pages and parts of every stay; and the length of the ring without pages that nobody has."""
    # Pages that somebody has, as extents apart from one another, and how many come before each.
    used = _joined([span[:2] for ring in rings for spans in ring.spans for span in spans])
    before = [0, *accumulate(length for _, length in used)]
    firsts = [first for first, _ in used]

    def extents(spans: Iterable[tuple[int, int, int]]) -> tuple[Extent, ...]:
        found: list[Extent] = []
        for first, length, _ in spans:
            at = bisect_right(firsts, first) - 1
            first = first - firsts[at] + before[at]
            if found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], found[-1][1] + length)
            else:
                found.append((first, length))
        return tuple(found)

    laid = tuple(
        tuple(
            LaidStay(extents(spans), _parts([span[1:] for span in spans], live.weight, demand))
            for live, spans in zip(method.live_ranges, ring.spans, strict=True)
        )
        for method, ring in zip(methods, rings, strict=True)
    )
    return laid, before[-1]


def shortest(method: MethodRanges, pages: Mapping[str, int], *, enough_pages: int = 0) -> tuple[int, int]:
    """The fewest pages that the best of several cuts needs, or the first that needs at most `enough_pages`; and that
    cut. Every range has its pages from its beginning on, so that its copy overlaps with the step before."""
    if not method.live_ranges:
        return 0, 0
    by_step = loads(method, pages)
    enough_pages = max(enough_pages, *by_step)
    # A cut before step s is crossed by the live ranges that cover both s - 1 and s.
    crossing = [min(by_step[step - 1], by_step[step]) for step in range(method.step_count)]
    cuts = sorted(range(method.step_count), key=lambda step: (crossing[step], step))
    tries = min(max(RANGES_TIMES_CUTS // len(method.live_ranges), CUTS_AT_LEAST), CUTS_AT_MOST)
    best: tuple[int, int] | None = None
    for cut in cuts[:tries]:
        ring = allocate(method, pages, cut, below_pages=None if best is None else best[0])
        if ring is not None:
            best = ring.page_count, cut
            if ring.page_count <= enough_pages:
                break
    assert best is not None
    return best


def allocate(
    method: MethodRanges,
    pages: Mapping[str, int],
    cut: int,
    *,
    ring_pages: int | None = None,
    below_pages: int | None = None,
    leads: bool = True,
) -> Ring | None:
    """Pages for every range, on a line that begins with step `cut`; None where `ring_pages` are too few for that.

    Without `ring_pages` the ring grows as it must; None as soon as it takes no fewer than `below_pages`. With `leads` a
    range has its pages from the beginning of its live range on, and without from its first reader on: it is then copied
    before that as far as there is room.
    """
    count = method.step_count
    spans: list[list[_Span]] = [[] for _ in method.live_ranges]
    begins = [((live.begin_step if leads else live.first_step) - cut) % count for live in method.live_ranges]
    # Pages that come free: when, and the last step until which they are: that of the line's end, or of their crossing
    # range.
    releases: list[tuple[int, int, list[tuple[int, int]]]] = []
    waiting: list[tuple[int, int, int]] = []
    crossing: list[int] = []
    page_count = 0
    for index, live in enumerate(method.live_ranges):
        begin = begins[index]
        end = begin + live.end_step - (live.begin_step if leads else live.first_step)
        held = pages[live.weight]
        if end < count:
            waiting.append((begin, -end, index))
        else:
            crossing.append(index)
            heappush(releases, (end - count, begin - 1, [(page_count, held)]))
            spans[index].append((page_count, held, None))
            page_count += held
    # Free pages by that last step, those that were read longest ago first; and the steps for which there are some.
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
        # Best fit: the pages that are wanted back soonest, of those that are free long enough.
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
    return Ring(page_count, _resolved(method, spans, begins, crossing, free, releases, leads=leads))


def _resolved(
    method: MethodRanges,
    spans: Sequence[Sequence[_Span]],
    begins: Sequence[int],
    crossing: Sequence[int],
    free: Mapping[int, Iterable[_Span]],
    releases: Sequence[tuple[int, int, Sequence[tuple[int, int]]]],
    *,
    leads: bool,
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Pages that nobody had before on the line were last read in the run before, as they are at its end."""
    count = method.step_count
    last = [(first, length, ended) for pool in free.values() for first, length, ended in pool if ended is not None]
    last += [(first, length, ended) for ended, _, released in releases for first, length in released]
    last.sort()
    firsts = [first for first, _, _ in last]
    found: list[tuple[tuple[int, int, int], ...]] = []
    is_crossing = frozenset(crossing)
    for index, (live, mine) in enumerate(zip(method.live_ranges, spans, strict=True)):
        # From the line to the run of the live range's first access.
        shift = (live.begin_step if leads else live.first_step) - begins[index]
        resolved: list[tuple[int, int, int]] = []
        for first, length, ended in mine:
            if ended is not None:
                resolved.append((first, length, ended + shift))
                continue
            before = shift if index in is_crossing else shift - count
            at = bisect_right(firsts, first) - 1
            while length:
                held_first, held_length, until = last[at]
                taken = min(length, held_first + held_length - first)
                resolved.append((first, taken, until + before))
                first, length, at = first + taken, length - taken, at + 1
        # The pages that are free first hold the first bytes.
        found.append(tuple(sorted(resolved, key=_until)))
    return tuple(found)


def _until(span: tuple[int, int, int]) -> int:
    return span[2]


def _merged(spans: Sequence[_Span]) -> list[Extent]:
    """The same pages in as few extents as can be: what was torn apart would be handed on in ever smaller pieces."""
    return [spans[0][:2]] if len(spans) == 1 else _joined([span[:2] for span in spans])


def _joined(extents: list[Extent]) -> list[Extent]:
    """Sorted, and those that overlap or touch made one."""
    extents.sort()
    joined = extents[:1]
    for first, length in extents[1:]:
        last_first, last_length = joined[-1]
        if first <= last_first + last_length:
            joined[-1] = (last_first, max(last_length, first + length - last_first))
        else:
            joined.append((first, length))
    return joined


def _parts(spans: Sequence[tuple[int, int]], name: str, demand: Demand) -> tuple[Part, ...]:
    """Neighbouring pages that are free at the same time are copied together; so is what would be too little alone.

    `spans` are pages and the step until which they are blocked.
    """
    pages = sum([length for length, _ in spans])
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
