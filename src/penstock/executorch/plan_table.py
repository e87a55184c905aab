"""Plans for many budgets, made at export, or for packed weights when they are packed. A process without Python takes
the largest plan that its budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from penstock.executorch.description import PlanTable
from penstock.executorch.payload import StoredPlan
from penstock.executorch.plan_spacing import Spacing, spaced_plans
from penstock.executorch.planning import Planning, Task, planning
from penstock.plan.packed import Begins
from penstock.schedule import Schedule
from penstock.weight import Weight

# For all methods over one ring, the usual case. Closer plans take longer to make and gain at most 3% between the round
# percentages, which have plans of their own: tests/executorch/test_plan_spacing.py.
USUAL = Spacing(times=1.04, part_of_weights=1 / 2000)
# The same for packed weights, where a plan takes four times as long to find.
PACKED = Spacing(times=1.06, part_of_weights=1 / 500)
# For a delegate with a budget of its own, and for weights staged through host memory: rare, and as long to plan.
RARE = Spacing(times=1.2, part_of_weights=1 / 200)


@dataclass(frozen=True)
class MadeTable:
    """A row of the description, and the plans that it lists."""

    row: PlanTable
    plans: tuple[StoredPlan, ...]


def make_plan_tables(
    schedules: Sequence[Schedule],
    weights: Sequence[Weight],
    *,
    page_bytes: int,
    device: str,
    begins: Begins | None = None,
) -> list[MadeTable]:
    """One table for all methods over one ring. If there are several methods, also one for each alone.

    A table that reads some weights in place gets another one without, because staging holds no weight in place.
    `begins`: where the blocks of packed weights begin.
    """
    task = Task(schedules, weights, page_bytes, begins or {}, device)
    everything = tuple(range(len(schedules)))
    groups = [everything, *((number,) for number in everything if len(everything) > 1)]
    # disable=None: silent unless standard error is a terminal.
    with tqdm(desc="planning", unit=" plans", disable=None) as bar, planning(task, bar.update) as by:
        tables = [_table(by, methods, "auto") for methods in groups]
        return tables + [_table(by, found.row.methods, "stream") for found in tables if found.row.in_place]


def _table(by: Planning, methods: tuple[int, ...], placement: str) -> MadeTable:
    task = by.task
    planner = task.planner(methods, placement)
    # Pages are whole, so the floor of a small program may exceed the bytes of its weights.
    top_bytes = max(planner.floor_bytes, planner.full_bytes)
    usual = PACKED if task.packed_of(methods) else USUAL
    spacing = usual if len(methods) == len(task.schedules) and placement == "auto" else RARE
    weight_bytes = sum(weight.nbytes for weight in task.read_by(methods).values())
    plans = spaced_plans(
        partial(by.plans, methods, placement),
        planner.floor_bytes,
        top_bytes,
        weight_bytes,
        spacing,
        page_bytes=task.page_bytes,
        at_once=by.at_once,
    )
    stored: dict[int, StoredPlan] = {}
    for plan in plans:
        # A plan that holds less than its budget also serves smaller budgets. Of two alike, the later is no better.
        stored.setdefault(plan.device_bytes, plan.stored)
    made = tuple(stored[held] for held in sorted(stored))
    direct = {name for plan in plans for name in plan.direct}
    in_place = tuple(number for number, weight in enumerate(task.weights) if weight.name in direct)
    rows = tuple(plan.row() for plan in made)
    copying_bytes = planner.copying_bytes if placement == "auto" else 0
    row = PlanTable(methods, in_place, planner.floor_bytes, planner.full_bytes, copying_bytes, rows)
    return MadeTable(row, made)
