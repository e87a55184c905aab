"""What "auto" does with a budget too small for copying: weights are read over the link, where that is worth having."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration
from penstock.plan.menu_planner import FloorPlan, MenuPlanner
from penstock.plan.tuning import WORTHWHILE_TIMES


@dataclass(frozen=True)
class BelowCopying:
    planner: MenuPlanner
    # The least that is worth having.
    floor_bytes: int

    def floor(self) -> FloorPlan:
        found = self.planner.floor()
        plan = self.planner.plan(self.floor_bytes, None)
        return replace(found, floor_bytes=self.floor_bytes, plan=plan, resident_bytes=plan.resident_bytes)


def below_copying(
    copying: MenuPlanner, others: Sequence[MenuPlanner], page_bytes: int, calibration: Calibration | None
) -> BelowCopying | None:
    """Of the others, the one with the lowest floor that is worth having; None: none has a lower one than copying."""
    lower = [one for one in others if one.floor_bytes < copying.floor_bytes]
    if not lower:
        return None
    limit_s = WORTHWHILE_TIMES * copying.least_s(copying.floor_bytes, calibration)
    found: BelowCopying | None = None
    for one in lower:
        most_bytes = copying.floor_bytes if found is None else found.floor_bytes

        def is_worth_it(pages: int, one: MenuPlanner = one) -> bool:
            try:
                return one.least_s(pages * page_bytes, calibration) <= limit_s
            except BelowFloorError:
                return False

        least = _first(is_worth_it, -(-one.floor_bytes // page_bytes), -(-most_bytes // page_bytes))
        if least is not None:
            found = BelowCopying(one, max(one.floor_bytes, least * page_bytes))
    return found


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
