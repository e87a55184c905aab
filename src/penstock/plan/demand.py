"""What the methods of a program need of their weights: sizes in bytes and in pages, and what they take when held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES
from penstock.plan.tuning import COPY_OVERHEAD_BYTES
from penstock.schedule import Schedule
from penstock.weight import Weight


def small_copy_bytes(page_bytes: int) -> int:
    """Copies of fewer bytes are avoided. Where pages are smaller still, weights are too, and none is."""
    return COPY_OVERHEAD_BYTES if page_bytes >= COPY_OVERHEAD_BYTES else 0


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

    @cached_property
    def last_page_bytes(self) -> dict[str, int]:
        return {name: size - (self.pages[name] - 1) * self.page_bytes for name, size in self.nbytes.items()}

    @property
    def small_copy_bytes(self) -> int:
        return small_copy_bytes(self.page_bytes)

    @property
    def packs(self) -> bool:
        """Whether weights held whole share pages. Not where a page is finer than the alignment: it would only waste."""
        return self.page_bytes % RESIDENT_ALIGNMENT_BYTES == 0

    @cached_property
    def access_count(self) -> int:
        return sum(len(schedule.accesses) for schedule in self.schedules)

    def held_pages(self, names: Iterable[str]) -> int:
        """Pages of these weights when each is held whole."""
        return -(-sum(map(self.held_bytes.__getitem__, names)) // self.page_bytes)

    def held_pages_without(self, names: Iterable[str]) -> int:
        """Pages of all weights but these when each is held whole."""
        return -(-(self._all_held_bytes - sum(map(self.held_bytes.__getitem__, names))) // self.page_bytes)

    @cached_property
    def held_bytes(self) -> dict[str, int]:
        """What each weight takes when it is held whole, rounded up to where the next one may begin."""
        unit_bytes = RESIDENT_ALIGNMENT_BYTES if self.packs else self.page_bytes
        return {name: -(-size // unit_bytes) * unit_bytes for name, size in self.nbytes.items()}

    @cached_property
    def _all_held_bytes(self) -> int:
        return sum(self.held_bytes.values())

    @cached_property
    def full_pages(self) -> int:
        return self.held_pages(self.nbytes)

    def any_small(self, names: Iterable[str]) -> bool:
        """Whether copies of any of these would be mostly overhead, though the weights would share pages if held."""
        return any(self.nbytes[name] < self.small_copy_bytes for name in names)

    @cached_property
    def reuses(self) -> bool:
        """Whether some method accesses a weight more than once."""
        return any(len(schedule.weight_names) < len(schedule.accesses) for schedule in self.schedules)

    @cached_property
    def least_uses(self) -> int:
        """By how many methods every weight is accessed at the least."""
        methods = Counter(name for schedule in self.schedules for name in schedule.weight_names)
        return min((methods[name] for name in self.nbytes), default=0)

    def peak_pair_bytes(self, names: Collection[str]) -> int:
        """The most bytes that two neighbouring steps of any method read of these weights."""
        nbytes = {name: self.nbytes[name] for name in names}
        return max((sum([nbytes.get(name, 0) for name in pair]) for pair in self._pairs), default=0)

    @cached_property
    def _pairs(self) -> list[frozenset[str]]:
        pairs: list[frozenset[str]] = []
        for schedule in self.schedules:
            live = [schedule.live_weights(index) for index in range(len(schedule.steps))]
            pairs += [live[index - 1] | live[index] for index in range(len(live))]
        return pairs
