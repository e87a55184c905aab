"""Programs with experts that nobody thought of: schedules and weights, sound for a planner, banks or not."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight, are_experts

PAGE = 4096


@dataclass(frozen=True)
class ExpertProgram:
    schedules: tuple[Schedule, ...]
    weights: dict[str, Weight]

    @property
    def names(self) -> set[str]:
        return {access.weight for schedule in self.schedules for access in schedule.accesses}


def stacked(name: str, experts: int, row_bytes: int) -> Weight:
    return Weight(name, "uint8", (experts, row_bytes), (0, 1))


def schedule_of(method: str, accesses: list[tuple[str, int | None]]) -> Schedule:
    """Weights, each with the index that its rows are taken by, or None. One step for each."""
    made = tuple(
        Access(number, name, gathered=routing is not None, routing=routing)
        for number, (name, routing) in enumerate(accesses)
    )
    return Schedule(method, made, tuple(Step(f"k{number}", (number,)) for number in range(len(made))))


@st.composite
def expert_programs(draw: st.DrawFn, *, most_banks: int = 4) -> ExpertProgram:
    """Most weights make banks. Some do not: they are read whole, twice by one index, with too few others, in between.
    Rows that kernels cannot copy are read whole everywhere: programs that do otherwise are refused."""
    weights: dict[str, Weight] = {}
    groups: list[list[str]] = []
    for bank in range(draw(st.integers(1, most_banks))):
        experts = draw(st.sampled_from([1, 2, 3, 8, 16, 60]))
        groups.append([])
        for member in range(draw(st.integers(1, 3))):
            # Some are of other experts, or of rows that kernels cannot copy.
            count = experts if draw(st.integers(0, 19)) else experts + 1
            row_bytes = 16 * draw(st.sampled_from([1, 3, 16, 40, 257])) + 8 * (draw(st.integers(0, 29)) == 0)
            name = f"bank{bank}.{member}"
            weights[name] = stacked(name, count, row_bytes)
            groups[-1].append(name)
        weights[f"plain{bank}"] = Weight(f"plain{bank}", "uint8", (draw(st.integers(1, 3 * PAGE)),), (0,))
    schedules = []
    for method in range(draw(st.integers(1, 3))):
        accesses: list[tuple[str, int | None]] = []
        for routing, group in enumerate(draw(st.lists(st.sampled_from(range(len(groups))), min_size=1, max_size=6))):
            names: list[str] = draw(st.permutations(groups[group]))
            spoiled = draw(st.integers(0, 11))
            if spoiled == 0:
                names = names[1:]
            elif spoiled == 1:
                names = [*names, names[0]]
            reads = [(name, routing if are_experts(weights[name]) else None) for name in names]
            if spoiled == 2 and accesses:
                # Before what another index has taken last.
                accesses = [*accesses[:-1], *reads, accesses[-1]]
            elif spoiled == 3:
                accesses += [*reads[:-1], (names[-1], None)]
            else:
                accesses += reads
            if draw(st.booleans()):
                accesses.append((f"plain{draw(st.integers(0, len(groups) - 1))}", None))
        schedules.append(schedule_of(f"method{method}", accesses or [("plain0", None)]))
    return ExpertProgram(tuple(schedules), weights)
