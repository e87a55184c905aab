"""What "auto" does with a budget too small for copying: weights are read over the link, where that is worth having."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration
from penstock.plan.plan import Plan
from penstock.plan.planner import FloorPlan
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import WORTHWHILE_TIMES
from penstock.schedule import Schedule


class Choice(Protocol):
    @property
    def floor_bytes(self) -> int: ...

    def floor(self) -> FloorPlan: ...

    def plan(self, budget_bytes: int, calibration: Calibration | None) -> Plan: ...


@dataclass(frozen=True)
class BelowCopying:
    choice: Choice
    # The least that is worth having.
    floor_bytes: int

    def floor(self) -> FloorPlan:
        found = self.choice.floor()
        plan = self.choice.plan(self.floor_bytes, None)
        return replace(found, floor_bytes=self.floor_bytes, plan=plan, resident_bytes=plan.resident_bytes)


def below_copying(
    copying: Choice,
    choices: Sequence[Choice],
    schedules: Sequence[Schedule],
    page_bytes: int,
    calibration: Calibration | None,
) -> BelowCopying | None:
    """Of the choices, the one with the lowest floor that is worth having; None: none has a lower one than copying."""

    # Planned without times, which takes a fraction as long; what is planned with them later is no slower.
    def cost(choice: Choice, budget_bytes: int) -> float:
        plan = choice.plan(budget_bytes, None)
        return link_bytes(plan, schedules) if calibration is None else predicted_s(plan, schedules, calibration)

    lower = [choice for choice in choices if choice.floor_bytes < copying.floor_bytes]
    if not lower:
        return None
    limit = WORTHWHILE_TIMES * cost(copying, copying.floor_bytes)
    found: BelowCopying | None = None
    for choice in lower:
        most_bytes = copying.floor_bytes if found is None else found.floor_bytes

        def is_worth_it(pages: int, choice: Choice = choice) -> bool:
            try:
                return cost(choice, pages * page_bytes) <= limit
            except BelowFloorError:
                return False

        least = _first(is_worth_it, -(-choice.floor_bytes // page_bytes), -(-most_bytes // page_bytes))
        if least is not None:
            found = BelowCopying(choice, max(choice.floor_bytes, least * page_bytes))
    return found


def link_bytes(plan: Plan, schedules: Sequence[Schedule]) -> int:
    """What crosses the link in one run of each method: copies, and what linears read in host memory, once each.

    Rows that are gathered are left out: they are few, and the same in every plan.
    """
    copied = sum(method.warm.bytes_streamed for method in plan.methods)
    return copied + sum(
        placement.in_place_bytes
        for schedule, method in zip(schedules, plan.methods, strict=True)
        for access, placement in zip(schedule.accesses, method.placements, strict=True)
        if access.linear
    )


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The lowest number from `low` to below `high` for which it holds; more memory makes it no worse."""
    if low >= high:
        return None
    if holds(low):  # mostly so, and then one look is enough
        return low
    if not holds(high - 1):
        return None
    while low < high - 1:
        middle = (low + high - 1) // 2
        if holds(middle):
            high = middle + 1
        else:
            low = middle + 1
    return high - 1
