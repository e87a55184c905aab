"""What a bank's table should do, written once more from its description: a cache of experts by how often they were used
lately. Hits, misses and the content of every slot are compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

HALVING_CALLS = 64
USE = 4096
MOST_USES = 15


@dataclass
class _Use:
    weight: int = 0
    last: int = 0


@dataclass
class ReferenceTable:
    experts: int
    slots: int
    calls: int = 0  # since the table was empty
    taken: int = 0
    hits: int = 0
    misses: int = 0
    held: dict[int, int] = field(default_factory=dict)  # slot -> expert
    uses: dict[int, _Use] = field(default_factory=dict)

    def _now(self, expert: int) -> int:
        use = self.uses.get(expert, _Use())
        return use.weight >> (self.calls // HALVING_CALLS - use.last // HALVING_CALLS)

    def take(self, ids: Iterable[int]) -> tuple[int, int]:
        """One call by index. Hits and misses of it."""
        self.calls += 1
        wanted = sorted(set(ids))
        for expert in wanted:
            self.uses[expert] = _Use(self._now(expert) + USE, self.calls)
        hits = sum(expert in self.held.values() for expert in wanted)
        for expert in wanted:
            if expert in self.held.values():
                continue
            empty = [slot for slot in range(self.slots) if slot not in self.held]
            if empty:
                self.held[empty[0]] = expert
                continue
            free = [slot for slot, other in self.held.items() if other not in wanted]
            if free:
                slot = min(free, key=lambda s: (self._now(self.held[s]), self.uses[self.held[s]].last, s))
                self.held[slot] = expert
        return self._count(hits, len(wanted) - hits)

    def group(self, rows: Sequence[int]) -> tuple[int, int]:
        """One call by groups: so many rows for each expert."""
        self.calls += 1
        wanted = [expert for expert in range(self.experts) if rows[expert] > 0]
        hits = sum(expert in self.held.values() for expert in wanted)
        for slot in range(self.slots):
            left = [expert for expert in wanted if expert not in self.held.values()]
            if slot in self.held or not left:
                continue
            expert = max(left, key=lambda e: (rows[e], -e))
            self.held[slot] = expert
            self.uses[expert] = _Use(USE * min(rows[expert], MOST_USES), self.calls)
        return self._count(hits, len(wanted) - hits)

    def empty(self) -> None:
        """After a run that failed. What was counted stays."""
        self.calls = 0
        self.held.clear()
        self.uses.clear()

    def _count(self, hits: int, misses: int) -> tuple[int, int]:
        self.taken += 1
        self.hits += hits
        self.misses += misses
        return hits, misses
