"""What stays on the device for good and what streams: the choices among which the planner picks, and their cost.

A choice names the weights that are held whole and gives each of the others a suffix, in pages, that streams; the prefix
before it is resident. Equal suffixes keep the ring small (as long as a few of them, not of weights) and spread copies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.plan.demand import Demand
from penstock.plan.live_ranges import MethodRanges, live_ranges
from penstock.plan.ring import peak_load
from penstock.plan.tuning import COPY_OVERHEAD_BYTES


@dataclass(frozen=True)
class Streaming:
    """A set of weights that may stream, with their live ranges in every method. All others are held whole."""

    demand: Demand
    methods: tuple[MethodRanges, ...]
    # By weight: how many stays its accesses make, over all methods.
    stays: Mapping[str, int]

    @cached_property
    def whole(self) -> dict[str, int]:
        """Suffixes that leave no prefix: everything that may stream does."""
        return {name: self.demand.pages[name] for name in self.stays}

    @property
    def largest_pages(self) -> int:
        return max(self.whole.values(), default=0)

    def level(self, pages: int) -> dict[str, int]:
        """Suffixes cut to at most this many pages, or two where the last one holds too little for a copy."""
        suffixes = {name: min(size, pages) for name, size in self.whole.items()}
        return suffixes if pages > 1 else suffixes | dict.fromkeys(self.stubs, 2)

    @cached_property
    def stubs(self) -> list[str]:
        """Weights whose last page holds so little that a copy of it alone would be mostly overhead."""
        last_bytes, small_bytes = self.demand.last_page_bytes, self.demand.small_copy_bytes
        return [name for name, size in self.whole.items() if size > 1 and last_bytes[name] < small_bytes]

    def resident_pages(self, suffixes: Mapping[str, int]) -> int:
        """Pages of the weights held whole (a suffix of no pages makes one) and of the prefixes."""
        pages = self.demand.pages
        streamed = [name for name, suffix in suffixes.items() if suffix]
        prefixes = sum([pages[name] - suffixes[name] for name in streamed])
        return prefixes + self.demand.held_pages_without(streamed)

    def ring_load(self, suffixes: Mapping[str, int]) -> int:
        return max((peak_load(method, suffixes) for method in self.methods), default=0)

    def cost_bytes(self, suffixes: Mapping[str, int]) -> int:
        """What one warm run of every method moves, and what the copies cost beside it: one for each stay."""
        nbytes, pages, page_bytes = self.demand.nbytes, self.demand.pages, self.demand.page_bytes
        stays = self.stays
        cost = 0
        for name, suffix in suffixes.items():
            if suffix:
                cost += stays[name] * (nbytes[name] - (pages[name] - suffix) * page_bytes + COPY_OVERHEAD_BYTES)
        return cost

    def least_cost_bytes(self, budget_pages: int) -> int:
        """No suffixes of this choice cost less: everything that is not held streams, and the ring takes no room."""
        streamed_pages = max(0, sum(self.whole.values()) - (budget_pages - self._held_pages))
        # At best the weights that stream least often make up for all of it, and only as many as are needed.
        cost = 0
        page_bytes = self.demand.page_bytes
        for times, size in self._seldom_first:
            if streamed_pages <= 0:
                break
            taken = min(size, streamed_pages)
            # The last page of a weight may hold next to nothing.
            cost += times * (max(taken - 1, 0) * page_bytes + COPY_OVERHEAD_BYTES)
            streamed_pages -= taken
        return cost

    @cached_property
    def _seldom_first(self) -> list[tuple[int, int]]:
        """(stays, pages) of every weight."""
        return sorted(((self.stays[name], size) for name, size in self.whole.items()), key=lambda s: (s[0], -s[1]))

    @cached_property
    def seldom_first(self) -> list[list[str]]:
        """Weights by how often they stream, in the order of the schedule."""
        by_count: dict[int, list[str]] = {}
        for name, count in self.stays.items():
            by_count.setdefault(count, []).append(name)
        return [by_count[count] for count in sorted(by_count)]

    @cached_property
    def _sizes(self) -> tuple[list[int], list[int]]:
        """The weights' pages in rising order, and their sums from the end: what stays at a level follows from both."""
        sizes = sorted(self.whole.values())
        sums = [0]
        for size in reversed(sizes):
            sums.append(sums[-1] + size)
        return sizes, sums

    def prefix_pages(self, level: int) -> int:
        """Pages of the prefixes when suffixes are cut to this many pages: resident_pages(self.level(level)), for a
        level above 0, less what is held whole. Quick, because planning asks for it over and over."""
        sizes, sums = self._sizes
        longer = len(sizes) - bisect_right(sizes, level)
        return sums[longer] - longer * level

    def suffixes_beside(self, resident_pages: int) -> dict[str, int] | None:
        """The shortest suffixes of about equal length whose prefixes fit into so many pages; None if none do."""
        room_pages = resident_pages - self._held_pages
        low, high = 1, self.largest_pages
        if not high or self.prefix_pages(high) > room_pages:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.prefix_pages(middle) <= room_pages:
                high = middle
            else:
                low = middle + 1
        return self.shorten(self.level(high), room_pages - self.prefix_pages(high))

    @cached_property
    def _held_pages(self) -> int:
        return self.demand.held_pages_without(self.stays)

    @cached_property
    def _often(self) -> list[str]:
        """The weights that stream more often than others, the most often first."""
        least = min(self.stays.values(), default=0)
        often = [name for name, count in self.stays.items() if count > least]
        return sorted(often, key=lambda name: -self.stays[name])

    def shorten(self, suffixes: Mapping[str, int], spare_pages: int) -> dict[str, int]:
        """Suffixes cut further by as many pages in all: each page saved at the prefix is one that no run copies again.

        Weights that stream more often than others go first. Among the rest the longest suffixes lose a page each, and
        where there are not enough pages for all of them, evenly over the schedule.
        """
        shorter = dict(suffixes)
        for name in self._often:
            if not spare_pages:
                break
            taken = min(shorter.get(name, 0), spare_pages)
            if taken:
                shorter[name] -= taken
                spare_pages -= taken
        longest = max(shorter.values(), default=0) if spare_pages else 0
        while spare_pages and longest:
            names = [name for name, suffix in shorter.items() if suffix == longest]
            taken = min(len(names), spare_pages)
            for turn in range(taken):
                shorter[names[turn * len(names) // taken]] -= 1
            spare_pages -= taken
            longest -= 1
        for name in self.stubs:
            if shorter.get(name) == 1 and suffixes[name] > 1:
                shorter[name] = 2
        return shorter


def streaming(demand: Demand, may_stream: Iterable[str]) -> Streaming:
    """Of the weights in `may_stream`, those whose stays would last all the time in some method are held whole."""
    names = frozenset(may_stream)
    methods = tuple(live_ranges(schedule, names) for schedule in demand.schedules)
    return without(demand, methods, frozenset(name for method in methods for name in method.always))


def streaming_suffixes(chosen: Streaming, suffixes: Mapping[str, int]) -> Streaming:
    """The same, less the weights whose suffixes have no pages left, or that have none."""
    gone = frozenset(name for name in chosen.stays if not suffixes.get(name))
    return without(chosen.demand, chosen.methods, gone) if gone else chosen


def without(demand: Demand, methods: Sequence[MethodRanges], held: frozenset[str]) -> Streaming:
    """The choice with these live ranges, less those of the weights in `held`."""
    kept = tuple(
        replace(method, live_ranges=tuple([live for live in method.live_ranges if live.weight not in held]))
        if held
        else method
        for method in methods
    )
    stays = Counter(live.weight for method in kept for live in method.live_ranges)
    return Streaming(demand, kept, dict(stays))
