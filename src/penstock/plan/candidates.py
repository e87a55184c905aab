"""What streams and what is resident within a budget: one family of candidates, filled by one greedy.

A candidate is a set of weights that may stream, a cap on their suffixes, and room for copies to run ahead. The pages
that do not fit beside the ring must stream. One greedy chooses them: weights that a run streams least often go first,
and among equals suffixes are spread evenly over the schedule, so that copies are. Of the pages that are left, a part
goes to the other rows of the menu, which take a byte off the link for the same memory or less: what stays packed, and
prefixes of split weights. That part and the cap are not convex, so they are searched. Long suffixes mean few copies and
a long ring, short ones many copies and a short ring.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.plan.assembly import assemble
from penstock.plan.calibration import Calibration
from penstock.plan.live_ranges import MethodRanges, live_ranges
from penstock.plan.menu import Menu
from penstock.plan.pages import Demand
from penstock.plan.plan import Plan
from penstock.plan.reuse import RULES, Rule, keep
from penstock.plan.ring import allocate, least_crossed, loads, most_pages, peak_load, shortest
from penstock.plan.tuning import (
    COPY_OVERHEAD_BYTES,
    FIRST_PART_OF_PAGE,
    KEPT_ATTEMPTS,
    KEPT_ROOM_PART,
    LOOKAHEAD_BYTES,
    MANY_ACCESSES,
    SHARED_PAGES_ATTEMPTS,
    SIZE_FACTOR,
)

# Instead of a cap: the smallest cap that there is room for, with suffixes as equal as possible.
EVEN = 0


@dataclass(frozen=True)
class Streaming:
    """A set of weights that may stream, with their live ranges in every method. All others are held whole."""

    demand: Demand
    methods: tuple[MethodRanges, ...]

    @staticmethod
    def of(demand: Demand, names: Collection[str]) -> Streaming:
        """Weights of `names` whose stays would last all the time in some method are held whole."""
        methods = tuple(live_ranges(schedule, names) for schedule in demand.schedules)
        return Streaming(demand, methods).without_those_always_there()

    def without_those_always_there(self) -> Streaming:
        return self.without(frozenset(name for method in self.methods for name in method.always))

    def without(self, held: frozenset[str]) -> Streaming:
        if not held:
            return self
        methods = (
            replace(method, live_ranges=tuple([live for live in method.live_ranges if live.weight not in held]))
            for method in self.methods
        )
        return Streaming(self.demand, tuple(methods))

    @cached_property
    def stays(self) -> Counter[str]:
        """By weight: how many stays its accesses make, over all runs of all methods."""
        found = Counter[str]()
        for schedule, method in zip(self.demand.schedules, self.methods, strict=True):
            runs = self.demand.runs.get(schedule.method, 1)
            for live in method.live_ranges:
                found[live.weight] += runs
        return found

    @cached_property
    def whole(self) -> dict[str, int]:
        """Suffixes that leave no prefix: all pages of everything that may stream."""
        return {name: self.demand.pages[name] for name in self.stays}

    @cached_property
    def seldom_first(self) -> list[dict[str, int]]:
        """Pages of weights, grouped by how often they stream, least often first; within a group in schedule order."""
        by_count: dict[int, dict[str, int]] = {}
        for name, count in self.stays.items():
            by_count.setdefault(count, {})[name] = self.whole[name]
        return [by_count[count] for count in sorted(by_count)]

    @cached_property
    def stubs(self) -> list[str]:
        """Weights whose last page holds so little that a copy of it alone would be mostly overhead."""
        return [name for name, size in self.whole.items() if size > 1 and self.demand.last_page_is_small(name)]

    def longest(self, cap: int) -> dict[str, int]:
        """Suffixes of everything that may stream, up to the cap."""
        suffixes = {name: min(size, cap or size) for name, size in self.whole.items()}
        return suffixes if cap != 1 else suffixes | dict.fromkeys(self.stubs, 2)

    def resident_pages(self, suffixes: Mapping[str, int]) -> int:
        """Pages of the weights held whole (those that have no suffix) and of the prefixes."""
        pages = self.demand.pages
        prefixes = sum([pages[name] - suffix for name, suffix in suffixes.items()])
        return prefixes + self.demand.held_pages_without(suffixes)

    def least_cap(self, streamed_pages: int) -> int:
        """The smallest cap with which the suffixes of all weights together have this many pages."""
        largest = max(self.whole.values(), default=1)
        return 1 + bisect_left(range(1, largest), streamed_pages, key=lambda cap: _capacity(self.whole, cap))

    def suffixes(self, cap: int, resident_pages: int) -> dict[str, int] | None:
        """Non-empty suffixes that leave at most this many pages resident; None if there are none."""
        streamed_pages = max(self.demand.full_pages - resident_pages, 0)
        for _ in range(SHARED_PAGES_ATTEMPTS):
            found = self._streamed(cap, streamed_pages)
            if found is None:
                return None
            found.update((name, 2) for name in self.stubs if found.get(name) == 1)
            # Held weights share pages and streamed ones do not, so a little more may have to stream.
            over = self.resident_pages(found) - resident_pages
            if over <= 0:
                return found
            streamed_pages += over
        return None

    def _streamed(self, cap: int, streamed_pages: int) -> dict[str, int] | None:
        """Of weights that stream equally often, those long enough for the cap go first: equal suffixes take over one
        another's place."""
        is_even = cap == EVEN
        cap = self.least_cap(streamed_pages) if is_even else cap
        # One page of these would hold next to nothing.
        left_out = frozenset(self.stubs if cap == 1 else ())
        found: dict[str, int] = {}
        left = streamed_pages
        for equals in self.seldom_first:
            sizes = {name: size for name, size in equals.items() if name not in left_out}
            long = {name: cap for name, size in sizes.items() if size >= cap}
            short = {name: size for name, size in sizes.items() if size < cap}
            for some in [short | long] if is_even else [long, short]:
                capacity = sum(some.values())
                if left < capacity:
                    return found | (_level(some, left) if is_even else _spread(some, left))
                found |= some
                left -= capacity
        return found if left <= 0 else None


def _level(sizes: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Parts of these that add up to `wanted`, as equal as possible: only some of the longest get the last page."""
    level = 1 + bisect_left(range(1, max(sizes.values())), wanted, key=lambda level: _capacity(sizes, level))
    ones = _spread({name: 1 for name, size in sizes.items() if size >= level}, wanted - _capacity(sizes, level - 1))
    parts = {name: min(size, level - 1) + ones.get(name, 0) for name, size in sizes.items()}
    return {name: size for name, size in parts.items() if size}


def _capacity(sizes: Mapping[str, int], cap: int) -> int:
    return sum([min(size, cap) for size in sizes.values()])


def _spread(sizes: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Whole sizes that add up to `wanted`, spread evenly over all of them, and one part for the rest."""
    found: dict[str, int] = {}
    capacity = sum(sizes.values())
    due, left = 0, wanted
    for name, size in sizes.items():
        due += size * wanted
        taken = min(size, left)
        if taken and 2 * due >= taken * capacity:
            found[name] = taken
            left -= taken
            due -= taken * capacity
    for name, size in sizes.items():
        more = min(size - found.get(name, 0), left)
        if more:
            found[name] = found.get(name, 0) + more
            left -= more
    return found


@dataclass(frozen=True)
class Draft:
    """What streams and how long the ring is, before stays have pages."""

    streaming: Streaming
    # One for every weight that streams.
    suffixes: Mapping[str, int]
    ring_pages: int
    leads: bool = False

    # By method, where the ring begins anew; empty while that is still open.
    cuts: tuple[int, ...] = ()

    @property
    def total_pages(self) -> int:
        return self.streaming.resident_pages(self.suffixes) + self.ring_pages

    def least_s(self, calibration: Calibration, menu: Menu, budget_pages: int) -> float:
        """A lower bound on the time of its plans: one copy for every stay of the timed methods, less what can stay
        packed in the rest of the budget."""
        demand, link = self.streaming.demand, calibration.link
        copies = Counter[str]()
        for schedule, method in zip(demand.schedules, self.streaming.methods, strict=True):
            if schedule.method in calibration.step_s:
                runs = menu.runs.get(schedule.method, 1)
                copies.update([live.weight for live in method.live_ranges] * runs)
        link_bytes = 0.0
        for name, count in copies.items():
            nbytes = demand.nbytes[name] - (demand.pages[name] - self.suffixes[name]) * demand.page_bytes
            link_bytes += count * nbytes * (menu.packed_part if name in menu.begins else 1)
        if menu.begins:
            rest_bytes = (budget_pages - self.total_pages) * demand.page_bytes
            return max(link_bytes - rest_bytes * max(copies.values(), default=0), 0) / link.bytes_per_s
        return link_bytes / link.bytes_per_s + link.copy_latency_s * copies.total()

    def plan(self, cut_part: float = 0.0) -> Plan | None:
        """A plan whose ring begins anew after `cut_part` of the stays; None if a page would be needed before it is
        free."""
        rings = []
        for method, cut in zip(self.streaming.methods, self.cuts or self._cuts(cut_part), strict=True):
            ring = allocate(method, self.suffixes, cut, ring_pages=self.ring_pages, leads=self.leads)
            if ring is None:
                return None
            rings.append(ring)
        return assemble(self.streaming.demand, self.suffixes, self.streaming.methods, rings)

    def laid(self) -> Plan:
        """The plan of a draft that is known to close."""
        plan = self.plan()
        assert plan is not None, "more pages than are needed are enough"
        return plan

    def _cuts(self, part: float) -> list[int]:
        """Cuts by method; for part 0, the one that the fewest pages cross."""
        return [
            method.live_ranges[int(len(method.live_ranges) * part)].first_step
            if part and method.live_ranges
            else least_crossed(method, self.suffixes)
            for method in self.streaming.methods
        ]

    def worst_step(self) -> tuple[str | None, int | None, tuple[str, ...]]:
        """The first method and step with the largest load, and the weights that make it."""
        most = 0
        worst: tuple[str | None, int | None, tuple[str, ...]] = None, None, ()
        for schedule, method in zip(self.streaming.demand.schedules, self.streaming.methods, strict=True):
            by_step = loads(method, self.suffixes)
            if max(by_step, default=0) > most:
                most = max(by_step)
                step = by_step.index(most)
                names = tuple(
                    live.weight
                    for live in method.live_ranges
                    if (step - live.begin_step) % method.step_count <= live.end_step - live.begin_step
                )
                worst = (schedule.method, step, names)
        return worst


def least_ring(streaming: Streaming, menu: Menu, budget_pages: int, cap: int, part: float = 0.0) -> int | None:
    """The shortest ring that a draft may have. A longer ring leaves less room for prefixes, so suffixes grow and need a
    longer ring. Repeats until the ring holds them."""
    ring_pages, load = 0, 1
    while load > ring_pages:
        ring_pages = load
        suffixes = _suffixes_beside_ring(streaming, menu, budget_pages - ring_pages, cap, part)
        if suffixes is None:
            return None
        load = peak_load(streaming.methods, suffixes, leads=False)
    return ring_pages


def draft(
    streaming: Streaming, menu: Menu, budget_pages: int, cap: int, ring_pages: int, part: float = 0.0
) -> Draft | None:
    """A draft with this ring; None if it does not fit. Other rows get `part` of the pages that neither the ring nor the
    cap asks for."""
    suffixes = _suffixes_beside_ring(streaming, menu, budget_pages - ring_pages, cap, part)
    if suffixes is None:
        return None
    return Draft(streaming.without(frozenset(streaming.stays.keys() - suffixes.keys())), suffixes, ring_pages)


def _suffixes_beside_ring(
    streaming: Streaming, menu: Menu, room_pages: int, cap: int, part: float
) -> dict[str, int] | None:
    if not part:
        return streaming.suffixes(cap, room_pages)
    longest = streaming.longest(cap)
    spare_pages = room_pages - streaming.resident_pages(longest)
    if spare_pages < 0:
        return None
    other_pages = min(int(part * spare_pages), menu.most_other_pages(longest, spare_pages))
    return longest if other_pages == spare_pages else streaming.suffixes(cap, room_pages - other_pages)


def _laid(streaming: Streaming, enough_pages: int = 0) -> Draft:
    """Whole weights that lead, in the shortest ring found for them, or the first with which `enough_pages` do."""
    enough_pages -= streaming.resident_pages(streaming.whole)
    found = [shortest(method, streaming.whole, enough_pages=enough_pages) for method in streaming.methods]
    ring_pages = max((pages for pages, _ in found), default=0)
    return Draft(streaming, streaming.whole, ring_pages, leads=True, cuts=tuple(cut for _, cut in found))


def _kept(streaming: Streaming, budget_pages: int, rule: Rule) -> list[Draft]:
    """The same weights in fewer stays: whole, and with the rest of the budget spent on their prefixes."""
    many = streaming.demand.access_count > MANY_ACCESSES
    room_pages = budget_pages - streaming.resident_pages(streaming.whole)
    # What the cycle costs beyond the load: left free at once where accesses are many, else found by giving pages.
    room_pages -= room_pages // KEPT_ROOM_PART if many else 0
    for _ in range(KEPT_ATTEMPTS):
        kept = [keep(method, streaming.whole, room_pages, rule) for method in streaming.methods]
        methods = tuple(method for method in kept if method is not None)
        if len(methods) < len(kept):
            return []
        laid = _laid(Streaming(streaming.demand, methods).without_those_always_there(), budget_pages)
        over = laid.total_pages - budget_pages
        if over <= 0:
            found = [replace(laid, ring_pages=laid.ring_pages - over)]
            ring_pages = laid.ring_pages + min(LOOKAHEAD_BYTES // streaming.demand.page_bytes, -over)
            suffixes = laid.streaming.suffixes(EVEN, budget_pages - ring_pages)
            if suffixes is not None:
                few = laid.streaming.without(frozenset(laid.suffixes.keys() - suffixes.keys()))
                found.append(replace(laid, streaming=few, suffixes=suffixes, ring_pages=ring_pages))
            return found
        room_pages -= 2 * over if many else over
    return []


class CandidateSets:
    """Sets of weights that may stream, from all of them to none. A set is computed when it is needed.

    A small weight that streams costs a page and a copy; one that is held shares pages. Which weights count as small
    depends on the schedule, so there are sets for a series of sizes: each lets the weights above one size stream.
    """

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        free = [name for name in demand.nbytes if name not in demand.pinned]
        names: dict[frozenset[str], None] = {frozenset(free): None}
        limit_bytes = max(demand.page_bytes // FIRST_PART_OF_PAGE, 1)
        while limit_bytes < max((demand.nbytes[name] for name in free), default=0):
            names[frozenset(name for name in free if demand.nbytes[name] > limit_bytes)] = None
            limit_bytes *= SIZE_FACTOR
        names[frozenset()] = None
        self._names = [*names]
        self._streaming: dict[frozenset[str], Streaming] = {}

    def _of(self, names: frozenset[str]) -> Streaming:
        if names not in self._streaming:
            self._streaming[names] = Streaming.of(self.demand, names)
        return self._streaming[names]

    def fitting(self, budget_pages: int) -> list[Streaming]:
        """Distinct sets that may fit."""
        fit = [names for names in self._names if self.demand.held_pages_without(names) <= budget_pages]
        if self.demand.access_count > MANY_ACCESSES:
            fit = sorted(fit, key=lambda names: self._guessed_cost_bytes(names, budget_pages))[:1]
        return list({one.methods: one for one in map(self._of, fit) if one.stays}.values())

    def kept(self, budget_pages: int) -> list[Draft]:
        """Whole weights, left in the ring between uses as far as there is room."""
        if not self.demand.reuses:
            return []
        rules = RULES[: 1 if self.demand.access_count > MANY_ACCESSES else None]
        return [kept for one in self.fitting(budget_pages) for rule in rules for kept in _kept(one, budget_pages, rule)]

    def _guessed_cost_bytes(self, names: frozenset[str], budget_pages: int) -> int:
        """The bytes of these that must stream, and the cost of their copies if all were as long as the longest."""
        nbytes, page_bytes = self.demand.nbytes, self.demand.page_bytes
        room_bytes = (budget_pages - self.demand.held_pages_without(names)) * page_bytes
        streamed_bytes = max(0, sum([nbytes[name] for name in names]) - room_bytes)
        longest_bytes = max((self.demand.pages[name] for name in names), default=1) * page_bytes
        return streamed_bytes - streamed_bytes // -longest_bytes * COPY_OVERHEAD_BYTES

    def lowest(self) -> Draft:
        """The draft with the fewest pages when all that may stream does; of equals, the one that streams least."""
        best: tuple[tuple[int, int], Draft] | None = None
        for names in sorted(self._names, key=self._least_pages):
            if best is not None and self._least_pages(names) > best[0][0]:
                break
            one = self._of(names)
            if best is not None and one.resident_pages(one.whole) + peak_load(one.methods, one.whole) > best[0][0]:
                continue
            lowest = _laid(one)
            cost_bytes = sum(one.stays[name] * (self.demand.nbytes[name] + COPY_OVERHEAD_BYTES) for name in one.whole)
            if best is None or (lowest.total_pages, cost_bytes) < best[0]:
                best = (lowest.total_pages, cost_bytes), lowest
        assert best is not None, "one set is that of none"
        return best[1]

    def _least_pages(self, names: frozenset[str]) -> int:
        """Pages that are held, and pages that two neighbouring steps read."""
        return self.demand.held_pages_without(names) + self.demand.peak_pair_bytes(names) // self.demand.page_bytes

    def surely_fits(self, budget_pages: int) -> bool:
        """Whether `lowest` surely fits, judged without giving any pages. Finding the exact floor takes time, which a
        budget well above it can do without."""
        return any(
            one.resident_pages(one.whole) + max(most_pages(method, one.whole) for method in one.methods) <= budget_pages
            for one in self.fitting(budget_pages)
        )
