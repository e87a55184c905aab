"""How accesses may reach their weights: copied ahead of their use, read in host memory, or whichever suits each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from penstock.plan.calibration import Calibration
from penstock.plan.demand import small_copy_bytes
from penstock.plan.direct import IsDirect, read_directly_by_default, stand_ins, with_direct
from penstock.plan.plan import Plan
from penstock.plan.planner import FloorPlan, Planner
from penstock.schedule import Access, Schedule
from penstock.weight import Weight

# What does not fit is: copied; read in place; or read in place where only rows of it are read, and copied otherwise.
MODES = ("auto", "streamed", "direct")


class ModePlanner:
    """The plans of one program in one mode at different budgets, with the interface of Planner."""

    def __init__(
        self, schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int, mode: str
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))}")
        self._schedules = tuple(schedules)
        self._weights = weights
        self._page_bytes = page_bytes
        self._mode = mode
        self._planners: dict[frozenset[str], Planner] = {}

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that `plan` accepts."""
        return self._planner(frozenset()).floor_bytes

    @cached_property
    def full_bytes(self) -> int:
        """Device bytes of the plan that holds everything. A larger budget buys nothing."""
        return self._planner(frozenset(self._shelf)).full_bytes

    def floor(self) -> FloorPlan:
        found = self._planner(frozenset()).floor()
        return replace(found, plan=self._whole(found.plan, frozenset()))

    def plan(self, budget_bytes: int, calibration: Calibration | None = None) -> Plan:
        """The plan that takes the least time within the budget, or without a calibration the one that moves the least.

        Raises BelowFloorError where no plan is safe and still overlaps.
        """
        held = self._held(budget_bytes)
        return self._whole(self._planner(held).plan(budget_bytes, calibration), held)

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        """One warm run of every method that was calibrated, back to back with others of its own."""
        return self._planner(frozenset()).predicted_s(plan, calibration)

    def _held(self, budget_bytes: int) -> frozenset[str]:
        """Of the weights that need no device memory, those that get some: when there is more than the rest can use."""
        held: frozenset[str] = frozenset()
        if not self._shelf or budget_bytes < self._planner(held).full_bytes:
            return held
        if budget_bytes >= self.full_bytes:
            return frozenset(self._shelf)
        for name in self._shelf:
            if self._planner(held | {name}).full_bytes <= budget_bytes:
                held |= {name}
        return held

    @cached_property
    def _shelf(self) -> list[str]:
        """Weights that all accesses may read directly, those first that gain the most by being held.

        A kernel that reads all of a weight gains more than one that gathers; and twice read is twice gained.
        """
        accesses = [access for schedule in self._schedules for access in schedule.accesses]
        kept = {access.weight for access in accesses if not self._may_be_direct(access)}
        gathered = {access.weight: access.gathered for access in accesses if access.weight not in kept}
        times = Counter(access.weight for access in accesses)
        return sorted(gathered, key=lambda name: (gathered[name], -times[name], -self._weights[name].nbytes))

    def _may_be_direct(self, access: Access) -> bool:
        nbytes = self._weights[access.weight].nbytes
        if self._mode == "direct":
            return bool(nbytes) and not access.pinned
        # Small weights share pages with others and are never copied: nothing is gained by reading them in place.
        is_worth_it = nbytes >= max(small_copy_bytes(self._page_bytes), 1)
        return self._mode == "auto" and is_worth_it and read_directly_by_default(access)

    def _is_direct(self, held: frozenset[str]) -> IsDirect:
        return lambda access: access.weight not in held and self._may_be_direct(access)

    def _planner(self, held: frozenset[str]) -> Planner:
        if held not in self._planners:
            schedules, weights = stand_ins(self._schedules, self._weights, self._is_direct(held))
            self._planners[held] = Planner(schedules, weights, page_bytes=self._page_bytes)
        return self._planners[held]

    def _whole(self, plan: Plan, held: frozenset[str]) -> Plan:
        return with_direct(plan, self._schedules, self._weights, self._is_direct(held))
