"""What a soak counts, and the table at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

# In this order; what is counted by a name of its own ("error ConcurrentRunError") follows its heading.
HEADINGS = (
    "sessions",
    "loads",
    "closes",
    "program runs",
    "replays",
    "budget changes",
    "state accesses",
    "calibrations",
    "traces",
    "interrupts delivered",
    "interrupt",
    "faults injected",
    "fault",
    "changes of files",
    "runs by two threads at once",
    "errors as they should be",
    "error",
    "leaks",
    "faults found",
)


class Tally(Counter[str]):
    def add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self[name] += count

    def table(self) -> str:
        return "\n".join(f"{name:<42} {count:>12,}" for name, count in self._rows())

    def _rows(self) -> Iterable[tuple[str, int]]:
        for heading in HEADINGS:
            if heading in ("interrupt", "fault", "error"):
                prefix = f"{heading} "
                yield from ((f"  {name[len(prefix) :]}", self[name]) for name in sorted(self) if _is_of(name, heading))
            else:
                yield heading, self[heading]


def _is_of(name: str, heading: str) -> bool:
    return name.startswith(f"{heading} ") and name not in HEADINGS
