"""What stays on the device for good and what streams: the choices among which the planner picks, and their cost.

A choice names the weights that are held whole and gives each of the others a tail, in pages, that streams; the head
before it is resident. Equal tails keep the ring small (three tails, not three weights) and spread the copies evenly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES
from penstock.plan.ring import peak_load
from penstock.plan.stays import MethodArcs, method_arcs
from penstock.schedule import Schedule
from penstock.weight import Weight

# What one copy costs beside its bytes, in bytes of the link: 4 to 5 us of a link of 55 GB/s.
COPY_OVERHEAD_BYTES = 256 * 1024


@dataclass(frozen=True)
class Demand:
    """What the methods need: sizes in bytes and in pages of every weight that is accessed and has bytes."""

    schedules: tuple[Schedule, ...]
    page_bytes: int
    nbytes: Mapping[str, int]
    pinned: frozenset[str]

    @staticmethod
    def of(schedules: Sequence[Schedule], weights: Mapping[str, Weight], page_bytes: int) -> Demand:
        names = dict.fromkeys(name for schedule in schedules for name in schedule.weight_names)
        nbytes = {name: weights[name].nbytes for name in names if weights[name].nbytes > 0}
        pinned = {access.weight for schedule in schedules for access in schedule.accesses if access.pinned}
        return Demand(tuple(schedules), page_bytes, nbytes, frozenset(pinned & nbytes.keys()))

    @cached_property
    def pages(self) -> dict[str, int]:
        return {name: -(-size // self.page_bytes) for name, size in self.nbytes.items()}

    @property
    def packs(self) -> bool:
        """Whether weights held whole share pages. Not where a page is finer than the alignment: it would only waste."""
        return self.page_bytes % RESIDENT_ALIGNMENT_BYTES == 0

    def held_pages(self, names: Iterable[str]) -> int:
        """Pages of these weights when each is held whole."""
        if not self.packs:
            return sum(self.pages[name] for name in names)
        aligned = sum(-(-self.nbytes[name] // RESIDENT_ALIGNMENT_BYTES) for name in names) * RESIDENT_ALIGNMENT_BYTES
        return -(-aligned // self.page_bytes)


@dataclass(frozen=True)
class Streaming:
    """A set of weights that may stream, with their arcs in every method. All others are held whole."""

    demand: Demand
    methods: tuple[MethodArcs, ...]
    # By weight: how many stays its accesses make, over all methods.
    stays: Mapping[str, int]

    @cached_property
    def held(self) -> frozenset[str]:
        return frozenset(self.demand.nbytes.keys() - self.stays.keys())

    @cached_property
    def whole(self) -> dict[str, int]:
        """Tails that leave no head: everything that may stream does."""
        return {name: self.demand.pages[name] for name in self.stays}

    @property
    def largest_pages(self) -> int:
        return max(self.whole.values(), default=0)

    def level(self, pages: int) -> dict[str, int]:
        """Tails cut to at most this many pages."""
        return {name: min(size, pages) for name, size in self.whole.items()}

    def resident_pages(self, tails: Mapping[str, int]) -> int:
        """Pages of the weights held whole (a tail of no pages makes one) and of the heads."""
        pages = self.demand.pages
        heads = sum(pages[name] - tail for name, tail in tails.items() if tail)
        return heads + self.demand.held_pages([*self.held, *(name for name, tail in tails.items() if not tail)])

    def ring_load(self, tails: Mapping[str, int]) -> int:
        return max((peak_load(method, tails) for method in self.methods), default=0)

    def cost_bytes(self, tails: Mapping[str, int]) -> int:
        """What one warm run of every method moves, and what the copies cost beside it."""
        demand = self.demand
        return sum(
            self.stays[name] * (demand.nbytes[name] - (demand.pages[name] - tail) * demand.page_bytes)
            + self.stays[name] * COPY_OVERHEAD_BYTES
            for name, tail in tails.items()
            if tail
        )

    def least_cost_bytes(self, budget_pages: int) -> int:
        """No tails of this choice cost less: everything that is not held streams, and the ring takes no room."""
        streamed_pages = max(0, sum(self.whole.values()) - (budget_pages - self._held_pages))
        # At best the weights that stream least often make up for all of it, and only as many as are needed.
        cost = 0
        page_bytes = self.demand.page_bytes
        for name in sorted(self.whole, key=lambda name: (self.stays[name], -self.whole[name])):
            if streamed_pages <= 0:
                break
            taken = min(self.whole[name], streamed_pages)
            # The last page of a weight may hold next to nothing.
            cost += self.stays[name] * (max(taken - 1, 0) * page_bytes + COPY_OVERHEAD_BYTES)
            streamed_pages -= taken
        return cost

    def lowest_level(self, budget_pages: int) -> int | None:
        """The shortest tails that fit, as far as the load tells; None if even whole weights do not."""

        def fits(pages: int) -> bool:
            tails = self.level(pages)
            return self.resident_pages(tails) + self.ring_load(tails) <= budget_pages

        low, high = 1, self.largest_pages
        if not fits(high):
            return None
        while low < high:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle + 1
        return high

    @cached_property
    def _sizes(self) -> tuple[list[int], list[int]]:
        """The weights' pages in rising order, and their sums from the end: what stays at a level follows from both."""
        sizes = sorted(self.whole.values())
        sums = [0]
        for size in reversed(sizes):
            sums.append(sums[-1] + size)
        return sizes, sums

    def head_pages(self, level: int) -> int:
        """Pages of the heads when tails are cut to this many pages: resident_pages(self.level(level)), for a level
        above 0, less what is held whole. Quick, because planning asks for it over and over."""
        sizes, sums = self._sizes
        longer = len(sizes) - bisect_right(sizes, level)
        return sums[longer] - longer * level

    def tails_beside(self, resident_pages: int) -> dict[str, int] | None:
        """The shortest tails of about equal length whose heads fit into so many pages; None if not even none do."""
        room_pages = resident_pages - self._held_pages
        low, high = 1, self.largest_pages
        if not high or self.head_pages(high) > room_pages:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.head_pages(middle) <= room_pages:
                high = middle
            else:
                low = middle + 1
        return self.shorten(self.level(high), room_pages - self.head_pages(high))

    @cached_property
    def _held_pages(self) -> int:
        return self.demand.held_pages(self.held)

    def shorten(self, tails: Mapping[str, int], spare_pages: int) -> dict[str, int]:
        """Tails cut further by as many pages in all: each page saved at the head is one that no run copies again.

        Weights that stream more often than others go first. Among the rest the longest tails lose a page each, and
        where there are not enough pages for all of them, evenly over the schedule.
        """
        shorter = dict(tails)
        least = min((self.stays[name] for name in tails), default=0)
        for name in sorted(tails, key=lambda name: -self.stays[name]):
            if self.stays[name] > least and spare_pages:
                taken = min(shorter[name], spare_pages)
                shorter[name] -= taken
                spare_pages -= taken
        while spare_pages and any(shorter.values()):
            longest = max(shorter.values())
            names = [name for name, tail in shorter.items() if tail == longest]
            taken = min(len(names), spare_pages)
            for turn in range(taken):
                shorter[names[turn * len(names) // taken]] -= 1
            spare_pages -= taken
        return shorter


def streaming(demand: Demand, may_stream: Iterable[str]) -> Streaming:
    """Of the weights in `may_stream`, those whose stays would last all the time in some method are held whole."""
    names = frozenset(may_stream)
    methods = tuple(method_arcs(schedule, names) for schedule in demand.schedules)
    return _without(demand, methods, frozenset(name for method in methods for name in method.always))


def streaming_tails(chosen: Streaming, tails: Mapping[str, int]) -> Streaming:
    """The same, less the weights whose tails have no pages left."""
    return _without(chosen.demand, chosen.methods, frozenset(name for name, tail in tails.items() if not tail))


def _without(demand: Demand, methods: Sequence[MethodArcs], held: frozenset[str]) -> Streaming:
    kept = tuple(
        replace(method, arcs=tuple(arc for arc in method.arcs if arc.weight not in held)) for method in methods
    )
    stays: dict[str, int] = {}
    for method in kept:
        for arc in method.arcs:
            stays[arc.weight] = stays.get(arc.weight, 0) + 1
    return Streaming(demand, kept, stays)


def size_classes(demand: Demand) -> list[frozenset[str]]:
    """Sets of weights that may stream, from all of them to none: those above each of a ladder of sizes.

    Small weights cost a page and a copy each when they stream, and share pages when they do not. Which are small
    depends on the schedule, so the ladder goes all the way.
    """
    free = [name for name in demand.nbytes if name not in demand.pinned]
    largest = max((demand.nbytes[name] for name in free), default=0)
    classes: dict[frozenset[str], None] = {frozenset(free): None}
    limit_bytes = max(demand.page_bytes // 256, 1)
    while limit_bytes < largest:
        classes[frozenset(name for name in free if demand.nbytes[name] > limit_bytes)] = None
        limit_bytes *= 4
    classes[frozenset()] = None
    return list(classes)
