"""The schedule of one compiled method: which weights are fetched, in which order, and who reads them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Access:
    """One call of the fetch op. `number` is what the compiled code passes; numbers are unique within a method."""

    number: int
    weight: str
    # Read where its lifetime cannot be followed (a control-flow body): the weight must stay in place all the time.
    pinned: bool = False
    # Only some rows of it are read, by index: an embedding table, or experts that are routed to.
    gathered: bool = False
    # Every reader is a penstock_linear, which multiplies by its rows wherever each of them lies.
    linear: bool = False
    # For experts that an op of ours reads: accesses of one method with the same number are taken by the same index.
    # None: no experts.
    routing: int | None = None


@dataclass(frozen=True)
class Step:
    """One emitted launch that reads at least one weight, with the numbers of the accesses it reads."""

    kernel: str
    accesses: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Accesses in the order in which the compiled code makes them, and steps in the order in which it runs them.

    The compiled code fetches an access right before the first step that reads it, and reports the end of every step.
    """

    method: str
    accesses: tuple[Access, ...]
    steps: tuple[Step, ...]

    @cached_property
    def access_by_number(self) -> dict[int, Access]:
        return {access.number: access for access in self.accesses}

    @cached_property
    def first_step(self) -> dict[int, int]:
        """Access number -> index of the first step that reads it."""
        first: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            for number in step.accesses:
                first.setdefault(number, index)
        return first

    @cached_property
    def last_step(self) -> dict[int, int]:
        """Access number -> index of the last step that reads it."""
        return {number: index for index, step in enumerate(self.steps) for number in step.accesses}

    def live_weights(self, index: int) -> frozenset[str]:
        """Names of the weights that must hold their bytes while step `index` runs."""
        return self._live[index]

    @cached_property
    def _live(self) -> tuple[frozenset[str], ...]:
        live: list[set[str]] = [set() for _ in self.steps]
        for access in self.accesses:
            for index in range(self.first_step[access.number], self.last_step[access.number] + 1):
                live[index].add(access.weight)
        return tuple(frozenset(names) for names in live)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Every weight once, in the order of first access."""
        return tuple(dict.fromkeys(access.weight for access in self.accesses))
