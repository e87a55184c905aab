"""The plans where given accesses are split: others are planned as if those read nothing, and prefixes get the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from penstock.plan.calibration import Calibration
from penstock.plan.demand import Demand
from penstock.plan.direct import IsDirect, stand_ins, with_direct
from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES
from penstock.plan.plan import Plan
from penstock.plan.planner import FloorPlan, Planner
from penstock.plan.prefixes import Spare, allocate_prefixes, host_curves
from penstock.plan.ratios import TimeCurve
from penstock.plan.split import IsSplit, with_prefixes
from penstock.plan.tuning import MANY_ACCESSES, PREFIX_PARTS, PREFIX_PARTS_OF_MANY
from penstock.schedule import Access, Schedule
from penstock.weight import Weight


class SplitChoice:
    def __init__(
        self,
        schedules: Sequence[Schedule],
        weights: Mapping[str, Weight],
        page_bytes: int,
        *,
        may_be_direct: IsDirect,
        may_be_split: IsSplit,
    ) -> None:
        self._schedules = schedules
        self._weights = weights
        self._page_bytes = page_bytes
        self._may_be_direct = may_be_direct
        self._may_be_split = may_be_split

    @property
    def floor_bytes(self) -> int:
        return self._rest.floor_bytes

    @property
    def full_bytes(self) -> int:
        return self._demand.full_pages * self._page_bytes

    def floor(self) -> FloorPlan:
        found = self._rest.floor()
        return replace(found, plan=self._whole(found.plan))

    def plan(self, budget_bytes: int, calibration: Calibration | None) -> Plan:
        """Prefixes get what everything else leaves, which is nothing where that does not fit."""
        if budget_bytes >= self.full_bytes:
            return Planner(self._schedules, self._weights, page_bytes=self._page_bytes).plan(budget_bytes)
        return self.divided(budget_bytes, budget_bytes, calibration, host_curves(self._schedules, calibration))

    def divisions(self, budget_bytes: int) -> list[int]:
        """Bytes that everything else might get, so that prefixes get more and more. None below the floor."""
        above_bytes = budget_bytes - self.floor_bytes
        if above_bytes < 0:
            return []
        parts = PREFIX_PARTS if self._demand.access_count <= MANY_ACCESSES else PREFIX_PARTS_OF_MANY
        # More than it can use makes no difference to the rest.
        rests = (min(budget_bytes - int(above_bytes * part), self._rest.full_bytes) for part in parts)
        return [pages * self._page_bytes for pages in dict.fromkeys(rest // self._page_bytes for rest in rests)]

    def divided(
        self, budget_bytes: int, rest_bytes: int, calibration: Calibration | None, curves: Mapping[str, TimeCurve]
    ) -> Plan:
        """Everything else within `rest_bytes`, and prefixes, by these curves, in what that leaves."""
        rest = self._whole(self._rest.plan(rest_bytes, calibration))
        unheld = frozenset(rest.direct_weights)
        pages = (budget_bytes - rest.device_bytes) // self._page_bytes
        prefixes = allocate_prefixes(
            [self._weights[name] for name in self._split if name in unheld],
            [self._weights[name] for name in self._tables if name in unheld],
            curves,
            Spare(pages, self._page_bytes, self._alignment_bytes),
        )
        return with_prefixes(rest, self._schedules, self._weights, prefixes, self._may_be_split, self._alignment_bytes)

    @cached_property
    def _rest(self) -> Planner:
        schedules, weights = stand_ins(self._schedules, self._weights, self._is_in_place)
        return Planner(schedules, weights, page_bytes=self._page_bytes)

    def _whole(self, plan: Plan) -> Plan:
        return with_direct(plan, self._schedules, self._weights, self._is_in_place)

    def _is_in_place(self, access: Access) -> bool:
        return self._may_be_split(access) or self._may_be_direct(access)

    @cached_property
    def _split(self) -> tuple[str, ...]:
        accesses = (access for schedule in self._schedules for access in schedule.accesses)
        return tuple(dict.fromkeys(access.weight for access in accesses if self._may_be_split(access)))

    @cached_property
    def _tables(self) -> list[str]:
        """Weights that are only read in place, as a whole: those first that are read most often."""
        accesses = [access for schedule in self._schedules for access in schedule.accesses]
        others = {access.weight for access in accesses if not self._may_be_direct(access) or self._may_be_split(access)}
        times = Counter(access.weight for access in accesses if access.weight not in others)
        return sorted(times, key=lambda name: (-times[name], -self._weights[name].nbytes))

    @cached_property
    def _demand(self) -> Demand:
        return Demand.of(self._schedules, self._weights, self._page_bytes)

    @property
    def _alignment_bytes(self) -> int:
        """As weights held whole lie anywhere else."""
        return RESIDENT_ALIGNMENT_BYTES if self._demand.packs else self._page_bytes
