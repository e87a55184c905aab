"""Plans for many budgets, made at export: a process without Python takes the largest that its budget allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import UnsupportedProgramError
from penstock.executorch.payload import WEIGHT_SHIFT, Rung
from penstock.plan.planner import Planner
from penstock.runtime.records import plan_numbers
from penstock.schedule import Schedule
from penstock.weight import Weight

BETWEEN = 24


def budgets_between(floor_bytes: int, full_bytes: int, page_bytes: int, count: int = BETWEEN) -> list[int]:
    """From the floor to everything resident, in equal steps of whole pages; each once, both ends included."""
    pages = (full_bytes - floor_bytes) // page_bytes
    steps = {floor_bytes + pages * step // (count + 1) * page_bytes for step in range(count + 1)}
    return sorted({*steps, floor_bytes, full_bytes})


def make_rungs(
    schedules: Sequence[Schedule], weights: Sequence[Weight], *, page_bytes: int
) -> tuple[int, int, list[Rung]]:
    """The floor, the bytes with everything resident, and the plans, smallest first."""
    for weight in weights:
        if weight.nbytes >> WEIGHT_SHIFT:
            raise UnsupportedProgramError(f"weight {weight.name!r} has {weight.nbytes} bytes, at most {2**40} will do")
    planner = Planner(schedules, {weight.name: weight for weight in weights}, page_bytes=page_bytes)
    floor_bytes, full_bytes = planner.floor_bytes, planner.full_bytes
    # Pages are whole: the floor of a small program may exceed what its weights take.
    top_bytes = max(floor_bytes, full_bytes)
    places: Mapping[str, int] = {weight.name: number << WEIGHT_SHIFT for number, weight in enumerate(weights)}
    rungs: dict[int, Rung] = {}
    for budget_bytes in budgets_between(floor_bytes, top_bytes, page_bytes):
        plan = planner.plan(budget_bytes)
        held_bytes = sum(block.nbytes for block in plan.blocks)
        # One that holds less than its budget serves smaller budgets too; of two alike, the later is no better.
        rungs.setdefault(held_bytes, Rung(held_bytes, bytes(plan_numbers(plan, places))))
    ladder = [rungs[held] for held in sorted(rungs)]
    return floor_bytes, full_bytes, ladder
