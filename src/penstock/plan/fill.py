"""What streams, and what is resident, within a budget: one greedy for every candidate.

The pages that do not fit beside the ring must stream. Which of them is one greedy: weights that a run streams least
often go first, and of equals suffixes are spread evenly over the schedule, so that copies are. Of the pages that are
left, a part goes to the other rows of the menu, which take a byte off the link for the same memory or less: what stays
packed, and prefixes of weights that are split. What is not convex, and is searched, is that part, and the cap: long
suffixes mean few copies and a long ring, short ones many copies and a short ring.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.plan.assembly import assemble
from penstock.plan.calibration import Calibration
from penstock.plan.menu import Menu
from penstock.plan.plan import Plan
from penstock.plan.residency import Streaming, streaming_suffixes
from penstock.plan.ring import allocate, lay, lost_pages, reading_load
from penstock.plan.tuning import CAP_FACTOR

# In the place of a cap: suffixes as equal as they can be.
EVEN = 0


@dataclass(frozen=True)
class Draft:
    """What streams, and through a ring of what length: before stays have pages."""

    chosen: Streaming
    suffixes: Mapping[str, int]
    ring_pages: int

    @cached_property
    def few(self) -> Streaming:
        return streaming_suffixes(self.chosen, self.suffixes)

    @property
    def lost_pages(self) -> int:
        """What is missing to a whole ring where one run meets the next."""
        return max((lost_pages(method, self.suffixes, self.ring_pages) for method in self.few.methods), default=0)

    def least_s(self, calibration: Calibration, menu: Menu, budget_pages: int) -> float:
        """No plan of it takes less: one copy for every stay of the methods that were timed, but for what stays packed
        in the rest of the budget."""
        link, packed = calibration.link, menu.begins
        suffix_bytes = {
            name: nbytes * menu.packed_part if name in packed else nbytes for name, nbytes in self._suffix_bytes.items()
        }
        copies = Counter[str]()
        for schedule, counts in zip(self.chosen.demand.schedules, self._stays, strict=True):
            if schedule.method in calibration.step_s:
                copies += counts
        link_bytes = sum(suffix_bytes[name] * count for name, count in copies.items())
        if packed:
            rest_pages = budget_pages - self.ring_pages - self.chosen.resident_pages(self.suffixes)
            link_bytes -= rest_pages * self.chosen.demand.page_bytes * max(copies.values(), default=0)
            return max(link_bytes, 0) / link.bytes_per_s
        return link_bytes / link.bytes_per_s + link.copy_latency_s * copies.total()

    @cached_property
    def _suffix_bytes(self) -> dict[str, int]:
        demand = self.chosen.demand
        return {
            name: demand.nbytes[name] - (demand.pages[name] - suffix) * demand.page_bytes
            for name, suffix in self.suffixes.items()
        }

    @cached_property
    def _stays(self) -> list[Counter[str]]:
        """By method: how often each weight is copied."""
        return [Counter([live.weight for live in method.live_ranges]) for method in self.few.methods]

    def plan(self, cut_part: float = 0.0) -> Plan | None:
        """None where a page would be needed before it is free. The ring begins anew after that part of the stays."""
        demand, methods = self.chosen.demand, self.few.methods
        rings = []
        for method in methods:
            cut = (
                method.live_ranges[int(len(method.live_ranges) * cut_part)].first_step
                if cut_part and method.live_ranges
                else 0
            )
            ring = allocate(method, self.suffixes, cut, ring_pages=self.ring_pages, leads=False)
            if ring is None:
                return None
            rings.append(ring)
        return assemble(demand, self.suffixes, methods, *lay(methods, rings, demand))


class Fill:
    """The drafts of one set of weights that may stream, within one budget."""

    def __init__(self, chosen: Streaming, budget_pages: int, menu: Menu) -> None:
        self.chosen = chosen
        self.budget_pages = budget_pages
        self._menu = menu
        self._least: dict[tuple[int, float], int | None] = {}

    @cached_property
    def caps(self) -> list[int]:
        """To begin with. EVEN is the least cap."""
        even = self.chosen.suffixes_beside(self.budget_pages - 1)
        if even is None:
            return []
        cap = max(1, *even.values())
        found = [EVEN]
        while cap < self.largest:
            found.append(cap)
            cap = max(cap + 1, math.ceil(cap * CAP_FACTOR))
        return [*found, self.largest]

    @property
    def largest(self) -> int:
        return self.chosen.largest_pages

    def draft(self, cap: int, ahead_pages: int, part: float = 0.0) -> Draft | None:
        """With a ring that lets copies run so many pages ahead; None where that does not fit. Other rows get that part
        of the pages that neither the ring nor the cap asks for."""
        least = self._least_ring_of(cap, part)
        if least is None:
            return None
        suffixes = self._suffixes_beside_ring(least + ahead_pages, cap, part)
        if suffixes is None:
            return None
        ring_pages = least + ahead_pages
        return Draft(self.chosen, {name: suffix for name, suffix in suffixes.items() if suffix}, ring_pages)

    def _least_ring_of(self, cap: int, part: float) -> int | None:
        if (cap, part) not in self._least:
            self._least[cap, part] = self._least_ring(cap, part)
        return self._least[cap, part]

    def _least_ring(self, cap: int, part: float) -> int | None:
        """A longer ring leaves less room for prefixes, so suffixes and the ring grow: until one holds the other."""
        length = 1
        while True:
            suffixes = self._suffixes_beside_ring(length, cap, part)
            if suffixes is None:
                return None
            few = streaming_suffixes(self.chosen, suffixes)
            load = max((reading_load(method, suffixes) for method in few.methods), default=0)
            if load <= length:
                return length
            length = load

    def _suffixes_beside_ring(self, ring_pages: int, cap: int, part: float) -> dict[str, int] | None:
        room_pages = self.budget_pages - ring_pages
        if not part:
            return self._suffixes(room_pages, cap)
        longest = self._longest(cap)
        spare_pages = room_pages - self.chosen.resident_pages(longest)
        if spare_pages < 0:
            return None
        other_pages = min(int(part * spare_pages), self._most_other_pages(longest, spare_pages))
        return longest if other_pages == spare_pages else self._suffixes(room_pages - other_pages, cap)

    def _longest(self, cap: int) -> dict[str, int]:
        """Of everything that may stream, up to the cap."""
        return self.chosen.whole if cap == EVEN else self.chosen.level(cap)

    def _most_other_pages(self, longest: Mapping[str, int], spare_pages: int) -> int:
        """What other rows can use at the most, when these are the suffixes without any of the spare pages."""
        if not self._menu.begins:
            return self._menu.other_pages
        # All suffixes packed. Each page more of a prefix is one less of these, which take less.
        part = self._menu.packed_part
        streamed = sum(size for name, size in longest.items() if name in self._menu.begins)
        if part * streamed >= spare_pages:
            return spare_pages
        packed_pages = part * max(0, streamed - spare_pages) / (1 - part)
        # What a weight's last page rounds up to.
        return min(spare_pages, math.ceil(packed_pages) + len(longest) // 2 + 1)

    def _suffixes(self, resident_pages: int, cap: int) -> dict[str, int] | None:
        """Suffixes beside which no more than so many pages are resident; None where there are none."""
        if cap == EVEN:
            return self.chosen.suffixes_beside(resident_pages)
        streamed = self.chosen.demand.full_pages - resident_pages
        for _ in range(8):
            found = _under_cap(self.chosen, cap, max(streamed, 0))
            if found is None:
                return None
            found.update((name, 2) for name in self.chosen.stubs if found.get(name) == 1)
            # What is held shares pages, what streams does not: it may take a little more.
            over = self.chosen.resident_pages(found) - resident_pages
            if over <= 0:
                return found
            streamed += over
        return None


def _under_cap(chosen: Streaming, cap: int, streamed_pages: int) -> dict[str, int] | None:
    """Of weights that stream equally often those that are long enough for the cap go first: equal suffixes take over
    one another's place."""
    pages, left = chosen.whole, streamed_pages
    suffixes: dict[str, int] = {}
    # One page of these would be next to nothing.
    left_out = frozenset(chosen.stubs if cap == 1 else ())
    for equals in chosen.seldom_first:
        equals = [name for name in equals if name not in left_out] if left_out else equals
        for names in ([n for n in equals if pages[n] >= cap], [n for n in equals if pages[n] < cap]):
            capacity = sum(min(pages[name], cap) for name in names)
            if left < capacity:
                suffixes.update(_spread({name: min(pages[name], cap) for name in names}, capacity, left))
                return suffixes
            suffixes.update((name, min(pages[name], cap)) for name in names)
            left -= capacity
    return suffixes if left <= 0 else None


def _spread(sizes: Mapping[str, int], capacity: int, wanted: int) -> dict[str, int]:
    """Whole sizes that come to `wanted`, evenly over all of them; and one part for the rest."""
    suffixes: dict[str, int] = {}
    due, left = 0, wanted
    for name, size in sizes.items():
        due += size * wanted
        taken = min(size, left)
        if taken and 2 * due >= taken * capacity:
            suffixes[name] = taken
            left -= taken
            due -= taken * capacity
    for name, size in sizes.items():
        more = min(size - suffixes.get(name, 0), left)
        if more:
            suffixes[name] = suffixes.get(name, 0) + more
            left -= more
    return suffixes
