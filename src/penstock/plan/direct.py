"""Accesses that are read where their weight lies in host memory: to the planner, accesses of nothing.

A direct access takes no device memory, waits for no copy and holds no page. So for planning its weight is replaced by a
stand-in without bytes, and in the plan that comes out its placement is put right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.plan.plan import DIRECT, NO_SLOTS, MethodPlan, Placement, Plan
from penstock.schedule import Access, Schedule
from penstock.weight import Weight

IsDirect = Callable[[Access], bool]

# No name of a weight has it: names of parameters and buffers are printable.
_MARK = "\0direct"


def read_directly_by_default(access: Access) -> bool:
    return access.gathered and not access.pinned


def stand_ins(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], is_direct: IsDirect
) -> tuple[list[Schedule], dict[str, Weight]]:
    """The same schedules, and the weights they name, with stand-ins for what is read directly."""
    used = dict(weights)

    def replaced(access: Access) -> Access:
        if not is_direct(access):
            return access
        name = access.weight + _MARK
        used.setdefault(name, Weight(name, weights[access.weight].dtype, (0,), (0,)))
        return replace(access, weight=name)

    return [replace(one, accesses=tuple(map(replaced, one.accesses))) for one in schedules], used


def with_direct(plan: Plan, schedules: Sequence[Schedule], weights: Mapping[str, Weight], is_direct: IsDirect) -> Plan:
    """The plan of the stand-ins as one of the schedules themselves.

    Where the weight is resident as a whole all the same, for other accesses, the direct ones read it there.
    """
    resident = {
        placement.weight: placement
        for method in plan.methods
        for placement in method.placements
        if placement.stay is None and placement.nbytes
    }

    def placed(access: Access, found: Placement) -> Placement:
        if not is_direct(access):
            return found
        weight = weights[access.weight]
        there = resident.get(weight.name)
        if there is not None:
            return replace(there, number=access.number)
        bank = None if access.routing is None else NO_SLOTS
        return Placement(access.number, weight.name, weight.nbytes, DIRECT, 0, None, bank=bank)

    def method(schedule: Schedule, found: MethodPlan) -> MethodPlan:
        pairs = zip(schedule.accesses, found.placements, strict=True)
        return replace(found, placements=tuple(placed(access, placement) for access, placement in pairs))

    return replace(plan, methods=tuple(map(method, schedules, plan.methods)))
