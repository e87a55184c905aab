"""Plans for many budgets, made at export: a process without Python takes the largest that its budget allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnsupportedProgramError
from penstock.executorch.payload import WEIGHT_SHIFT, Rung
from penstock.plan.check import check_plan
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.runtime.records import plan_numbers
from penstock.schedule import Schedule
from penstock.weight import Weight

BETWEEN = 24
# Of a delegate that gets a budget of its own, which is rare.
BETWEEN_ALONE = 8


@dataclass(frozen=True)
class Ladder:
    """The plans of some of a program's methods over one ring, smallest first."""

    methods: tuple[int, ...]
    floor_bytes: int
    # With everything resident.
    full_bytes: int
    rungs: tuple[Rung, ...]
    # Whether some access reads its weight where it lies in host memory.
    reads_in_place: bool = False

    def row(self) -> dict[str, Any]:
        """As the description of a program has it; the rungs themselves lie elsewhere."""
        return {
            "methods": self.methods,
            "reads_in_place": int(self.reads_in_place),
            "floor_bytes": self.floor_bytes,
            "full_bytes": self.full_bytes,
            "rungs": len(self.rungs),
            # One for each rung: a plan that is changed, or stands in the place of another, is not what was proved.
            "seals": [f"{rung.seal:016x}" for rung in self.rungs],
        }


def budgets_between(floor_bytes: int, full_bytes: int, page_bytes: int, count: int = BETWEEN) -> list[int]:
    """From the floor to everything resident, in equal steps of whole pages; each once, both ends included."""
    pages = (full_bytes - floor_bytes) // page_bytes
    steps = {floor_bytes + pages * step // (count + 1) * page_bytes for step in range(count + 1)}
    return sorted({*steps, floor_bytes, full_bytes})


def make_ladders(schedules: Sequence[Schedule], weights: Sequence[Weight], *, page_bytes: int) -> list[Ladder]:
    """All methods over one ring; and where there are several, each of them by itself.

    Where some weights are read in place, once more without: staging holds no weight in place.
    """
    for weight in weights:
        if weight.nbytes >> WEIGHT_SHIFT:
            raise UnsupportedProgramError(f"weight {weight.name!r} has {weight.nbytes} bytes, at most {2**40} will do")
    everything = tuple(range(len(schedules)))
    groups = [everything, *((number,) for number in everything if len(everything) > 1)]

    def ladder(methods: tuple[int, ...], placement: str) -> Ladder:
        chosen = [schedules[number] for number in methods]
        read = {access.weight for schedule in chosen for access in schedule.accesses}
        named = {weight.name: weight for weight in weights if weight.name in read}
        planner = Planner(chosen, named, page_bytes=page_bytes, placement=placement)
        between = BETWEEN if methods == everything else BETWEEN_ALONE

        def rung(budget_bytes: int) -> tuple[Plan, Rung]:
            plan = planner.plan(budget_bytes)
            # Whoever reads the file knows no schedule: what a plan is trusted for is shown here.
            check_plan(plan, chosen, named, budget_bytes=budget_bytes)
            return plan, Rung(plan.device_bytes, bytes(plan_numbers(plan, places)))

        return _ladder(methods, planner, rung, page_bytes, between)

    places = {weight.name: number << WEIGHT_SHIFT for number, weight in enumerate(weights)}
    ladders = [ladder(methods, "auto") for methods in groups]
    return ladders + [ladder(found.methods, "stream") for found in ladders if found.reads_in_place]


def _ladder(
    methods: tuple[int, ...],
    planner: Planner,
    rung_at: Callable[[int], tuple[Plan, Rung]],
    page_bytes: int,
    between: int,
) -> Ladder:
    floor_bytes, full_bytes = planner.floor_bytes, planner.full_bytes
    # Pages are whole: the floor of a small program may exceed what its weights take.
    top_bytes = max(floor_bytes, full_bytes)
    rungs: dict[int, Rung] = {}
    reads_in_place = False
    for budget_bytes in budgets_between(floor_bytes, top_bytes, page_bytes, between):
        plan, rung = rung_at(budget_bytes)
        reads_in_place |= bool(plan.direct_weights)
        # One that holds less than its budget serves smaller budgets too; of two alike, the later is no better.
        rungs.setdefault(rung.device_bytes, rung)
    return Ladder(methods, floor_bytes, full_bytes, tuple(rungs[held] for held in sorted(rungs)), reads_in_place)
