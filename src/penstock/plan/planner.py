"""The planner: from schedules, sizes and a budget to a plan. Pure and deterministic; the authority on the floor.

The way of a weight: residency.py and candidate_sets.py say who may stream, stays.py how long its stays are;
lap_choice.py (or, with times, search.py) and colour_choice.py give them pages, each in its way; assembly.py writes the
plan.
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
from penstock.plan.colour_choice import Placed, cheapest, lengthen_heads, lowest, place, run_ahead, surely_fits
from penstock.plan.demand import Demand
from penstock.plan.lap_choice import Laps, best_laps
from penstock.plan.plan import Plan
from penstock.plan.residency import streaming
from penstock.plan.reuse import cheapest_kept
from penstock.plan.search import Search, least
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import (
    LAPS_GOOD_PART,
    LOOKAHEAD_BYTES,
    LOOKAHEAD_PART,
    LOOKAHEAD_PART_OF_STREAM,
    MANY_ACCESSES,
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
        plan = self._lowest.plan()
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
        """The plan that takes the least time within the budget, or without a calibration the one that moves the least.

        Raises BelowFloorError where no plan is safe and still overlaps.
        """
        with _collector_paused():
            return self._plan(budget_bytes, calibration)

    def _plan(self, budget_bytes: int, calibration: Calibration | None) -> Plan:
        if budget_bytes >= self.full_bytes:
            return place(streaming(self._demand, ()), {}).plan()
        budget_pages = budget_bytes // self._page_bytes
        kept = cheapest_kept(self._sets, budget_pages) if self._demand.reuses else None
        kept_bytes = None if kept is None else kept.cost_bytes
        laps = best_laps(self._sets, budget_pages, self._usual_ahead_pages(budget_pages), kept_bytes)
        if laps is None and kept is None:
            # With one access each, to be kept is to be held: some weights whole, which laps do better unless few.
            kept = cheapest_kept(self._sets, budget_pages)
            kept_bytes = None if kept is None else kept.cost_bytes
        self._refuse_below_floor(budget_bytes)
        if calibration is not None:
            return self._fastest(budget_pages, calibration, laps, kept)
        if laps is not None and laps.cost_bytes * LAPS_GOOD_PART <= self._sets.least_cost_bytes(budget_pages) * 100:
            return laps.plan()
        coloured = self._coloured(budget_pages, kept_bytes if laps is None else laps.cost_bytes)
        if coloured is None and laps is not None:
            return laps.plan()
        coloured = coloured or kept
        assert coloured is not None, "where neither laps nor kept weights do, the floor's own choice does"
        return run_ahead(coloured, budget_pages).plan()

    def _coloured(self, budget_pages: int, below_cost_bytes: int | None) -> Placed | None:
        """The cheapest by colouring; the floor's own where nothing else does. None where it does not cost less."""
        many = self._demand.access_count > MANY_ACCESSES
        if many and below_cost_bytes is not None:
            return None
        coloured = None if many else cheapest(self._sets, budget_pages, below_cost_bytes)
        if coloured is None:
            coloured = lengthen_heads(self._lowest, budget_pages)
        return coloured if below_cost_bytes is None or coloured.cost_bytes < below_cost_bytes else None

    def _refuse_below_floor(self, budget_bytes: int) -> None:
        # The exact floor takes a colouring, which a budget well above it can do without.
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

    def _fastest(self, budget_pages: int, calibration: Calibration, usual: Laps | None, kept: Placed | None) -> Plan:
        """The plan whose runs take the least time: stays that take the ring in turn, or weights that are kept in it."""
        plans = [] if usual is None else [usual.plan()]
        others = [] if kept is None else [kept]
        if usual is None and kept is None:
            coloured = self._coloured(budget_pages, None)
            assert coloured is not None, "the floor's own choice is one"
            others.append(coloured)
        plans += [run_ahead(placed, budget_pages).plan() for placed in others]
        timed = [(self.predicted_s(plan, calibration), plan) for plan in plans]
        search = Search(
            self._sets.fitting(budget_pages), budget_pages, calibration, max(1, self._usual_ahead_pages(budget_pages))
        )
        return least([*timed, *search.run()])

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
    held_bytes = placed.chosen.resident_pages(placed.tails) * page_bytes
    held_count = len(placed.chosen.demand.nbytes) - len(placed.tails)
    method, step_index, names = placed.worst_step()
    held = f"{held_bytes} bytes for weights held all the time ({held_count} of them)"
    if method is None:
        return held
    listed = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{held} and {placed.ring_pages * page_bytes} bytes for step {step_index} of method {method!r}, during which "
        f"{listed} must be in place or on their way (pages of {page_bytes} bytes)"
    )
