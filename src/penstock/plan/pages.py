"""Device memory in pages: how large they are, and how many of them the weights of a program take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES, round_up
from penstock.plan.tuning import COPY_OVERHEAD_BYTES
from penstock.schedule import Schedule
from penstock.weight import Weight

# What every NVIDIA driver so far reports for memory that can be mapped. Load asks the driver itself.
CUDA_PAGE_BYTES = 2 << 20

_SOFT_PAGE_BYTES = 4096
# A plan handles memory page by page; this many keep planning quick, and rounding below a part in ten thousand.
_SOFT_PAGES = 16384
_LARGEST_SOFT_PAGE_BYTES = 2 << 20


def soft_page_bytes(weight_bytes: int) -> int:
    """The page size of the soft driver, which stands in for a device where programs run on the CPU."""
    page_bytes = _SOFT_PAGE_BYTES
    while page_bytes < _LARGEST_SOFT_PAGE_BYTES and weight_bytes > page_bytes * _SOFT_PAGES:
        page_bytes *= 2
    return page_bytes


def page_bytes_on(device: str, weight_bytes: int) -> int:
    """`device` is a type, "cpu" or "cuda"; `weight_bytes` is what all weights of the program take. Export, load and the
    command line must count with the same pages."""
    return CUDA_PAGE_BYTES if device == "cuda" else soft_page_bytes(weight_bytes)


def small_copy_bytes(page_bytes: int) -> int:
    """Copies of fewer bytes are avoided. 0 where pages are smaller still: weights are too, and no copy is avoided."""
    return COPY_OVERHEAD_BYTES if page_bytes >= COPY_OVERHEAD_BYTES else 0


@dataclass(frozen=True)
class Demand:
    """What the methods need: sizes in bytes and in pages of every weight that is accessed and has bytes."""

    schedules: tuple[Schedule, ...]
    page_bytes: int
    nbytes: Mapping[str, int]
    pinned: frozenset[str]
    # How often a method runs for one run of the others; once if it is not named.
    runs: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(schedules: Sequence[Schedule], weights: Mapping[str, Weight], page_bytes: int) -> Demand:
        names = dict.fromkeys(name for schedule in schedules for name in schedule.weight_names)
        nbytes = {name: weights[name].nbytes for name in names if weights[name].nbytes > 0}
        pinned = {access.weight for schedule in schedules for access in schedule.accesses if access.pinned}
        return Demand(tuple(schedules), page_bytes, nbytes, frozenset(pinned & nbytes.keys()))

    @cached_property
    def pages(self) -> dict[str, int]:
        return {name: -(-size // self.page_bytes) for name, size in self.nbytes.items()}

    def last_page_is_small(self, name: str) -> bool:
        """Whether a copy of its last page alone would be mostly overhead."""
        return self.nbytes[name] - (self.pages[name] - 1) * self.page_bytes < small_copy_bytes(self.page_bytes)

    def any_small(self, names: Iterable[str]) -> bool:
        """Whether copies of any of these would be mostly overhead, though the weights would share pages if held."""
        return any(self.nbytes[name] < small_copy_bytes(self.page_bytes) for name in names)

    @property
    def packs(self) -> bool:
        """Whether weights held whole share pages. Not where pages are finer than the alignment: it would only waste."""
        return self.page_bytes % RESIDENT_ALIGNMENT_BYTES == 0

    @cached_property
    def held_bytes(self) -> dict[str, int]:
        """What each weight takes when it is held whole, rounded up to where the next one may begin."""
        unit_bytes = RESIDENT_ALIGNMENT_BYTES if self.packs else self.page_bytes
        return {name: round_up(size, unit_bytes) for name, size in self.nbytes.items()}

    @cached_property
    def _all_held_bytes(self) -> int:
        return sum(self.held_bytes.values())

    @property
    def full_pages(self) -> int:
        return self.held_pages_without(())

    def held_pages_without(self, names: Iterable[str]) -> int:
        """Pages of all weights but these when each is held whole."""
        return -(-(self._all_held_bytes - sum(map(self.held_bytes.__getitem__, names))) // self.page_bytes)

    @cached_property
    def access_count(self) -> int:
        return sum(len(schedule.accesses) for schedule in self.schedules)

    @cached_property
    def reuses(self) -> bool:
        """Whether some method accesses a weight more than once."""
        return any(len(schedule.weight_names) < len(schedule.accesses) for schedule in self.schedules)

    def peak_pair_bytes(self, names: Collection[str]) -> int:
        """The most bytes that two neighbouring steps of any method read of these weights."""
        nbytes = {name: self.nbytes[name] for name in names}
        return max((sum([nbytes.get(name, 0) for name in pair]) for pair in self._pairs), default=0)

    @cached_property
    def _pairs(self) -> list[frozenset[str]]:
        return [
            schedule.live_weights(index - 1) | schedule.live_weights(index)
            for schedule in self.schedules
            for index in range(len(schedule.steps))
        ]
