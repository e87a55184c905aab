"""The planner: from schedules, sizes and a budget to a plan. Pure and deterministic; the authority on the floor.

The way of a weight: candidate_sets.py says who may stream, fifo.py how much of it, ring.py where it lies; search.py
picks the fastest, reuse.py what is kept between uses; assembly.py writes the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import BelowFloorError
from penstock.plan import floor
from penstock.plan.calibration import Calibration
from penstock.plan.candidate_sets import CandidateSets
from penstock.plan.demand import Demand
from penstock.plan.nominal import nominal
from penstock.plan.placed import Placed, lengthen_prefixes, lowest, place, surely_fits
from penstock.plan.plan import Plan
from penstock.plan.residency import streaming
from penstock.plan.reuse import cheapest_kept
from penstock.plan.search import Search, least
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import (
    LOOKAHEAD_BYTES,
    LOOKAHEAD_PART,
    LOOKAHEAD_PART_OF_STREAM,
    MEASURED_TRIALS,
    NOMINAL_TRIALS,
)
from penstock.schedule import Schedule
from penstock.weight import Weight


@dataclass(frozen=True)
class FloorPlan:
    """The floor, the plan that meets it, and what sets it. `method` and `step_index` are None when nothing streams."""

    floor_bytes: int
    plan: Plan
    resident_bytes: int
    ring_bytes: int
    method: str | None
    step_index: int | None
    # The weights in the ring at that step: in place, or on their way.
    weights: tuple[str, ...]


class Planner:
    """The plans of one program at different budgets: what they have in common is worked out once."""

    def __init__(self, schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int) -> None:
        floor.check_schedules(schedules, weights, granularity_bytes=page_bytes)
        self._demand = Demand.of(schedules, weights, page_bytes)
        self._sets = CandidateSets(self._demand)
        self._page_bytes = page_bytes

    @cached_property
    def _lowest(self) -> Placed:
        with _collector_paused():
            return lowest(self._sets)

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that `plan` accepts."""
        return self._lowest.total_pages * self._page_bytes

    @cached_property
    def full_bytes(self) -> int:
        """Device bytes of the plan that streams nothing. A larger budget buys nothing."""
        return self._demand.full_pages * self._page_bytes

    def floor(self) -> FloorPlan:
        plan = self._lowest.plan(self._lowest.total_pages)
        method, step_index, names = self._lowest.worst_step()
        return FloorPlan(
            floor_bytes=self.floor_bytes,
            plan=plan,
            resident_bytes=plan.resident_bytes,
            ring_bytes=plan.ring_bytes,
            method=method,
            step_index=step_index,
            weights=names,
        )

    def plan(self, budget_bytes: int, calibration: Calibration | None = None) -> Plan:
        """The plan that takes the least time within the budget, by measured times or on nominal machines.

        Raises BelowFloorError where no plan is safe and still overlaps.
        """
        with _collector_paused():
            return self._plan(budget_bytes, calibration)

    def _plan(self, budget_bytes: int, calibration: Calibration | None) -> Plan:
        if budget_bytes >= self.full_bytes:
            return place(streaming(self._demand, ()), {}).plan(self._demand.full_pages)
        budget_pages = budget_bytes // self._page_bytes
        known = [calibration] if calibration is not None else nominal(self._demand)
        found = self._searched(budget_pages, known, is_measured=calibration is not None)
        kept = cheapest_kept(self._sets, budget_pages) if not found or self._demand.reuses else None
        self._refuse_below_floor(budget_bytes)
        if not found and kept is None:
            kept = lengthen_prefixes(self._lowest, budget_pages)
        if kept is not None:
            plan = kept.plan(budget_pages)
            found.append((sum(self.predicted_s(plan, one) for one in known), plan))
        return least(found)

    def _searched(
        self, budget_pages: int, known: Sequence[Calibration], *, is_measured: bool
    ) -> list[tuple[float, Plan]]:
        """Small weights stream only where nothing else fits: a copy of one is mostly overhead."""
        sets = self._sets.fitting(budget_pages)
        ahead_pages = max(1, self._usual_ahead_pages(budget_pages))
        for small in (False, True):
            some = [chosen for chosen in sets if self._demand.any_small(chosen.stays) is small]
            found = Search(
                some,
                budget_pages,
                known,
                ahead_pages,
                least_ahead_pages=0 if is_measured else ahead_pages,
                trials=MEASURED_TRIALS if is_measured else NOMINAL_TRIALS,
            ).run()
            if found:
                return found
        return []

    def _refuse_below_floor(self, budget_bytes: int) -> None:
        # The exact floor takes time to find, which a budget well above it can do without.
        if surely_fits(self._sets, budget_bytes // self._page_bytes):
            return
        if budget_bytes < self.floor_bytes:
            raise BelowFloorError(
                f"the budget is {budget_bytes} bytes, but the floor is {self.floor_bytes} bytes: "
                f"{_reason(self._lowest)}",
                budget_bytes=budget_bytes,
                floor_bytes=self.floor_bytes,
            )

    def _usual_ahead_pages(self, budget_pages: int) -> int:
        streamed_pages = self._demand.full_pages - budget_pages
        return min(
            LOOKAHEAD_BYTES // self._page_bytes,
            budget_pages // LOOKAHEAD_PART,
            streamed_pages // LOOKAHEAD_PART_OF_STREAM,
        )

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        return predicted_s(plan, self._demand.schedules, calibration)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes a few hundred thousand objects and no cycles. To search them takes a quarter of its time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _reason(placed: Placed) -> str:
    page_bytes = placed.chosen.demand.page_bytes
    held_bytes = placed.chosen.resident_pages(placed.suffixes) * page_bytes
    held_count = len(placed.chosen.demand.nbytes) - len(placed.suffixes)
    method, step_index, names = placed.worst_step()
    held = f"{held_bytes} bytes for weights held all the time ({held_count} of them)"
    if method is None:
        return held
    listed = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{held} and {placed.ring_pages * page_bytes} bytes for step {step_index} of method {method!r}, during which "
        f"{listed} must be in place or on their way (pages of {page_bytes} bytes)"
    )
