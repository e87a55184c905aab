"""Weights that are left in the ring until they are read again, by the distance of their next use.

Between one stay of a weight and its next is a gap. To keep the weight through a gap saves a copy, and costs its pages
until the gap ends. Where there are not pages for all gaps, those that end furthest ahead are dropped first (Belady's
rule: along a line, with weights of equal size, nothing streams less). A weight that is kept through all of its gaps
never leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from penstock.plan.candidate_sets import CandidateSets
from penstock.plan.live_ranges import LiveRange, MethodRanges, join
from penstock.plan.placed import Placed, lengthen_prefixes, place
from penstock.plan.residency import Streaming, without
from penstock.plan.ring import loads
from penstock.plan.tuning import KEPT_ATTEMPTS, KEPT_ROOM_PART, MANY_ACCESSES

# What is dropped first, given a gap and the step at hand.
Rule = Callable[["Gap", int], int]


class Gap(NamedTuple):
    """Between a live range and the next of its weight, in steps from the run in which it begins."""

    live: int
    begin_step: int
    end_step: int
    pages: int


def cheapest_kept(sets: CandidateSets, budget_pages: int) -> Placed | None:
    """The cheapest choice in which weights are kept between their accesses; None where nothing fits."""
    best: Placed | None = None
    many = sets.demand.access_count > MANY_ACCESSES
    for _, candidate in sets.cheapest_first(budget_pages):
        if candidate.small and many:
            continue
        for chosen in [candidate.streaming] if many else candidate.variants:
            for rule in RULES[: 1 if many else None]:
                placed = _placed(chosen, budget_pages, rule)
                if placed is None:
                    continue
                placed = lengthen_prefixes(placed, budget_pages)
                if best is None or placed.cost_bytes < best.cost_bytes:
                    best = placed
            if many:
                return best
    return best


def _placed(chosen: Streaming, budget_pages: int, rule: Rule) -> Placed | None:
    room_pages = budget_pages - chosen.resident_pages(chosen.whole)
    if chosen.demand.access_count > MANY_ACCESSES:
        # What the cycle costs is left free at once, rather than found out by placing twice.
        room_pages -= room_pages // KEPT_ROOM_PART
    for _ in range(KEPT_ATTEMPTS):
        methods = [keep(method, chosen.whole, room_pages, rule) for method in chosen.methods]
        kept = [method for method in methods if method is not None]
        if len(kept) < len(methods):
            return None
        again = without(chosen.demand, kept, frozenset(name for method in kept for name in method.always))
        placed = place(again, again.whole, enough_pages=budget_pages)
        if placed.total_pages <= budget_pages:
            return placed
        room_pages -= placed.total_pages - budget_pages
    return None


def keep(method: MethodRanges, pages: Mapping[str, int], room_pages: int, rule: Rule) -> MethodRanges | None:
    """The same accesses in fewer stays, whose load is at most `room_pages`; None where it is more as it is."""
    base = loads(method, pages)
    if max(base, default=0) > room_pages:
        return None
    gaps = _gaps(method, pages)
    many = len(gaps) > MANY_ACCESSES
    kept = _drop(gaps, (), base, room_pages, rule)
    # Again, with what was left from the run before; and to the end without taking anything new, so that it fits.
    if not many:
        kept = _drop(gaps, kept, base, room_pages, rule)
    kept = _drop(kept, kept, base, room_pages, rule, closing=True)
    if not many:
        kept = _refill(gaps, kept, base, room_pages)
    return join(method, frozenset(gap.live for gap in kept))


def _furthest(gap: Gap, step: int) -> int:
    return gap.end_step


def _most_page_steps(gap: Gap, step: int) -> int:
    return (gap.end_step - step) * gap.pages


RULES: tuple[Rule, ...] = (_furthest, _most_page_steps)


def _gaps(method: MethodRanges, pages: Mapping[str, int]) -> list[Gap]:
    count = method.step_count
    following: dict[str, LiveRange] = {}
    first: dict[str, LiveRange] = {}
    for live in method.live_ranges:
        first.setdefault(live.weight, live)
    gaps: list[Gap] = []
    for index in reversed(range(len(method.live_ranges))):
        live = method.live_ranges[index]
        after = following.get(live.weight)
        next_begin = first[live.weight].begin_step + count if after is None else after.begin_step
        begin, length = (live.end_step + 1) % count, next_begin - live.end_step - 1
        gaps.append(Gap(index, begin, begin + length - 1, pages[live.weight]))
        following[live.weight] = live
    return gaps[::-1]


def _drop(
    gaps: Sequence[Gap],
    before: Iterable[Gap],
    base: Sequence[int],
    room_pages: int,
    rule: Rule,
    *,
    closing: bool = False,
) -> list[Gap]:
    """The gaps that are kept when steps are walked in order.

    Those of `before` that cross the end of the run are there when it begins. When `closing`, those of them that are
    dropped then are not kept when they come again: what is kept fits into every run.
    """
    count = len(base)
    begins: list[list[Gap]] = [[] for _ in base]
    for gap in gaps:
        begins[gap.begin_step].append(gap)
    ends: list[list[Gap]] = [[] for _ in range(2 * count)]
    # By live range, or its complement for those from the run before: which are inside, what to drop first.
    inside: set[int] = set()
    heap: list[tuple[int, int, Gap]] = []
    kept_pages = 0
    stale: set[int] = set()
    kept: dict[int, Gap] = {}
    for gap in before:
        if gap.end_step >= count:
            earlier = gap._replace(begin_step=gap.begin_step - count, end_step=gap.end_step - count)
            heappush(heap, (-rule(earlier, 0), ~gap.live, earlier))
            ends[earlier.end_step].append(earlier)
            inside.add(~gap.live)
            kept_pages += gap.pages
    for step in range(count):
        for gap in begins[step]:
            if gap.live in stale:
                continue
            heappush(heap, (-rule(gap, step), gap.live, gap))
            ends[gap.end_step].append(gap)
            inside.add(gap.live)
            kept[gap.live] = gap
            kept_pages += gap.pages
        while base[step] + kept_pages > room_pages:
            _, key, gap = heappop(heap)
            if key not in inside:
                continue
            inside.discard(key)
            kept_pages -= gap.pages
            kept.pop(gap.live, None)
            if closing and key < 0:
                stale.add(gap.live)
        for gap in ends[step]:
            key = gap.live if gap.begin_step >= 0 else ~gap.live
            if key in inside:
                inside.discard(key)
                kept_pages -= gap.pages
    return list(kept.values())


def _refill(gaps: Sequence[Gap], kept: Sequence[Gap], base: Sequence[int], room_pages: int) -> list[Gap]:
    """Gaps that fit in after all, the shortest first."""
    count = len(base)
    load = list(base)
    chosen = {gap.live: gap for gap in kept}

    def steps(gap: Gap) -> list[int]:
        return [step % count for step in range(gap.begin_step, gap.end_step + 1)]

    for gap in kept:
        for step in steps(gap):
            load[step] += gap.pages
    for gap in sorted(gaps, key=lambda gap: gap.end_step - gap.begin_step):
        if gap.live not in chosen and all(load[step] + gap.pages <= room_pages for step in steps(gap)):
            chosen[gap.live] = gap
            for step in steps(gap):
                load[step] += gap.pages
    return list(chosen.values())
