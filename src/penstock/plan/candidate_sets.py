"""Candidate sets: which weights may stream, from all of them to none. A set is worked out when it is needed.

Small weights cost a page and a copy each when they stream, and share pages when they do not. Which are small depends on
the schedule, so there are sets all the way: each lets those above a certain size stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from heapq import heapify, heappop, heappush

from penstock.plan.demand import Demand
from penstock.plan.residency import Streaming, streaming
from penstock.plan.tuning import COPY_OVERHEAD_BYTES, FIRST_PART_OF_PAGE, MANY_ACCESSES, SIZE_FACTOR


class CandidateSet:
    def __init__(self, demand: Demand, names: frozenset[str]) -> None:
        self.demand = demand
        self.names = names

    @cached_property
    def streaming(self) -> Streaming:
        return streaming(self.demand, self.names)

    @cached_property
    def variants(self) -> list[Streaming]:
        """The choice, and those in which weights that stream more often than others, or are small, are held whole."""
        chosen = self.streaming
        least = min(chosen.stays.values(), default=0)
        if max(chosen.stays.values(), default=0) == least:
            return [chosen] if chosen.stays else []
        seldom = [name for name, count in chosen.stays.items() if count == least]
        large = [name for name in seldom if not self.demand.any_small([name])]
        variants = [chosen, streaming(self.demand, seldom)]
        if len(large) < len(seldom):
            variants.append(streaming(self.demand, large))
        return [variant for variant in variants if variant.stays]

    @cached_property
    def small(self) -> bool:
        """Whether small weights may stream."""
        return self.demand.any_small(self.names)

    @cached_property
    def held_pages(self) -> int:
        return self.demand.held_pages_without(self.names)

    @cached_property
    def largest_pages(self) -> int:
        return max((self.demand.pages[name] for name in self.names), default=0)

    @cached_property
    def pair_pages(self) -> int:
        return self.demand.peak_pair_bytes(self.names) // self.demand.page_bytes

    def least_cost_bytes(self, budget_pages: int) -> int:
        """No plan of this choice costs less; a quick guess, made before the one is worked out."""
        streamed_bytes = max(0, self._nbytes - (budget_pages - self.held_pages) * self.demand.page_bytes)
        copies = -(-streamed_bytes // max(self.largest_pages * self.demand.page_bytes, 1))
        return self.demand.least_uses * (streamed_bytes + copies * COPY_OVERHEAD_BYTES)

    @cached_property
    def _nbytes(self) -> int:
        return sum(self.demand.nbytes[name] for name in self.names)


class CandidateSets:
    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        free = [name for name in demand.nbytes if name not in demand.pinned]
        largest = max((demand.nbytes[name] for name in free), default=0)
        names: dict[frozenset[str], None] = {frozenset(free): None}
        limit_bytes = max(demand.page_bytes // FIRST_PART_OF_PAGE, 1)
        while limit_bytes < largest:
            names[frozenset(name for name in free if demand.nbytes[name] > limit_bytes)] = None
            limit_bytes *= SIZE_FACTOR
        names[frozenset()] = None
        self.all = [CandidateSet(demand, each) for each in names]

    def cheapest_first(self, budget_pages: int) -> list[tuple[int, CandidateSet]]:
        """Candidates that may fit, with a cost that none of their plans comes below, in the order of that cost."""
        fitting = [one for one in self.all if one.held_pages <= budget_pages]
        return sorted(((one.least_cost_bytes(budget_pages), one) for one in fitting), key=lambda pair: pair[0])

    def fitting(self, budget_pages: int) -> list[Streaming]:
        """Different ones that may fit, in the order of the least that they cost."""
        first = [one for _, one in self.cheapest_first(budget_pages)]
        if self.demand.access_count > MANY_ACCESSES:
            first = first[:1]
        found = {frozenset(chosen.stays): chosen for one in first for chosen in one.variants}
        return sorted(found.values(), key=lambda chosen: chosen.least_cost_bytes(budget_pages))

    def least_cost_bytes(self, budget_pages: int) -> int:
        """No plan costs less."""
        return min(one.least_cost_bytes(budget_pages) for one in self.all if one.held_pages <= budget_pages)

    def lowest_first(self) -> Iterator[tuple[int, Streaming]]:
        """Choices with the pages that all of their weights need by load when they stream whole, in that order."""
        # (pages, index, how well they are known): beside what is held, the largest weight, two steps, the ring's load.
        heap = [(one.held_pages + max(one.largest_pages - 1, 0), index, 0) for index, one in enumerate(self.all)]
        heapify(heap)
        while heap:
            pages, index, known = heappop(heap)
            one = self.all[index]
            if known == 2:
                yield pages, one.streaming
            elif known == 1:
                chosen = one.streaming
                heappush(heap, (chosen.resident_pages(chosen.whole) + chosen.ring_load(chosen.whole), index, 2))
            else:
                heappush(heap, (one.held_pages + one.pair_pages, index, 1))

    @property
    def worked_out(self) -> list[Streaming]:
        return [one.streaming for one in self.all if "streaming" in one.__dict__]
