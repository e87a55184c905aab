"""Plans for many budgets, made at export, and for packed weights when they are packed: a process without Python takes
the largest that its budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.executorch.description import PlanTable
from penstock.executorch.payload import StoredPlan
from penstock.executorch.plan_spacing import Spacing, spaced_plans
from penstock.plan.check import check_plan
from penstock.plan.packed import Begins
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.runtime.records import plan_numbers
from penstock.schedule import Schedule
from penstock.weight import Weight

# Of all methods over one ring, as nearly everybody runs them. Closer ones take longer to plan, and gain at most 3%
# between the round parts. Those have plans of their own: tests/executorch/test_plan_spacing.py.
USUAL = Spacing(times=1.04, part_of_weights=1 / 2000)
# The same for packed weights, of which a plan takes four times as long to find.
PACKED = Spacing(times=1.06, part_of_weights=1 / 500)
# Of a delegate that gets a budget of its own, and of weights staged through host memory: rare, and as long to plan.
RARE = Spacing(times=1.2, part_of_weights=1 / 200)


@dataclass(frozen=True)
class MadeTable:
    """A row of the description, and the plans that it lists."""

    row: PlanTable
    plans: tuple[StoredPlan, ...]


def make_plan_tables(
    schedules: Sequence[Schedule], weights: Sequence[Weight], *, page_bytes: int, begins: Begins | None = None
) -> list[MadeTable]:
    """All methods over one ring; and where there are several, each of them by itself.

    Where some weights are read in place, once more without: staging holds no weight in place. `begins`: of packed
    weights.
    """
    everything = tuple(range(len(schedules)))
    groups = [everything, *((number,) for number in everything if len(everything) > 1)]

    def table(methods: tuple[int, ...], placement: str) -> MadeTable:
        chosen = [schedules[number] for number in methods]
        read = {access.weight for schedule in chosen for access in schedule.accesses}
        named = {weight.name: weight for weight in weights if weight.name in read}
        packed = {name: blocks for name, blocks in (begins or {}).items() if name in named}
        planner = Planner(chosen, named, page_bytes=page_bytes, placement=placement, begins=packed)

        def proved(budget_bytes: int) -> Plan:
            plan = planner.plan(budget_bytes)
            # Whoever reads the file knows no schedule: what a plan is trusted for is shown here.
            check_plan(plan, chosen, named, budget_bytes=budget_bytes, packed=packed)
            return plan

        # Pages are whole: the floor of a small program may exceed what its weights take.
        top_bytes = max(planner.floor_bytes, planner.full_bytes)
        usual = PACKED if packed else USUAL
        spacing = usual if methods == everything and placement == "auto" else RARE
        weight_bytes = sum(weight.nbytes for weight in named.values())
        plans = spaced_plans(
            proved, chosen, planner.floor_bytes, top_bytes, weight_bytes, spacing, page_bytes=page_bytes
        )
        stored: dict[int, StoredPlan] = {}
        for plan in plans:
            # One that holds less than its budget serves smaller budgets too; of two alike, the later is no better.
            is_copying = any(method.copies for method in plan.methods)
            numbers = bytes(plan_numbers(plan, (weight.name for weight in weights)))
            stored.setdefault(plan.device_bytes, StoredPlan(plan.device_bytes, numbers, is_copying))
        made = tuple(stored[held] for held in sorted(stored))
        direct = {name for plan in plans for name in plan.direct_weights}
        in_place = tuple(number for number, weight in enumerate(weights) if weight.name in direct)
        rows = tuple(plan.row() for plan in made)
        copying_bytes = planner.copying_bytes if placement == "auto" else 0
        return MadeTable(
            PlanTable(methods, in_place, planner.floor_bytes, planner.full_bytes, copying_bytes, rows), made
        )

    tables = [table(methods, "auto") for methods in groups]
    return tables + [table(found.row.methods, "stream") for found in tables if found.row.in_place]
