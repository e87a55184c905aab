"""The plans of one menu at different budgets. Pure and deterministic; the authority on the menu's floor.

The way of a weight: menu.py says which rows it may take, candidate_sets.py whether it may stream, fill.py how much of
it does, ring.py where that lies; search.py picks the fastest, reuse.py what is kept between uses; assembly.py writes
the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration
from penstock.plan.candidate_sets import CandidateSets
from penstock.plan.menu import Menu
from penstock.plan.nominal import nominal
from penstock.plan.placed import Placed, lengthen_prefixes, lowest, place, surely_fits
from penstock.plan.plan import Plan
from penstock.plan.residency import streaming
from penstock.plan.reuse import cheapest_kept
from penstock.plan.search import Room, Search, least
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import (
    LOOKAHEAD_BYTES,
    LOOKAHEAD_PART,
    LOOKAHEAD_PART_OF_STREAM,
    MEASURED_PARTS,
    MEASURED_TRIALS,
    NOMINAL_TRIALS,
    PACKED_PARTS,
)


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


class MenuPlanner:
    """What the plans have in common is worked out once."""

    def __init__(self, menu: Menu) -> None:
        self._menu = menu
        self._demand = menu.demand
        self._sets = CandidateSets(menu.demand)
        self._page_bytes = menu.page_bytes

    @cached_property
    def _lowest(self) -> Placed:
        with _collector_paused():
            return lowest(self._sets)

    @property
    def _streaming_floor_bytes(self) -> int:
        """Without slots, which packed weights pass through."""
        return self._lowest.total_pages * self._page_bytes

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that `plan` accepts."""
        if not self._lowest.ring_pages:
            return self._streaming_floor_bytes
        full_bytes = self._demand.full_pages * self._page_bytes
        return min(self._streaming_floor_bytes + self._menu.least_slots_bytes, full_bytes)

    @cached_property
    def full_bytes(self) -> int:
        """Device bytes of the plan that holds everything. A larger budget buys nothing."""
        return self._menu.full_pages * self._page_bytes

    def floor(self) -> FloorPlan:
        if self._menu.begins:
            plan = self.plan(self.floor_bytes)
        else:
            plan = self._menu.finished(self._lowest.plan(self._lowest.total_pages), self.floor_bytes, {})
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

    def plan(self, budget_bytes: int, calibration: Calibration | None = None, *, is_draft: bool = False) -> Plan:
        """The plan that takes the least time within the budget, by measured times or on nominal machines.

        Raises BelowFloorError where no plan is safe and still overlaps. A draft is judged by the same times, and fewer
        candidates are tried for it.
        """
        with _collector_paused():
            return self._plan(budget_bytes, calibration, is_draft=is_draft)

    def _plan(self, budget_bytes: int, calibration: Calibration | None, *, is_draft: bool) -> Plan:
        if budget_bytes >= self.full_bytes:
            everything = Menu(self._menu.schedules, self._menu.weights, self._page_bytes).demand
            return place(streaming(everything, ()), {}).plan(everything.full_pages)
        curves = self._menu.curves(calibration)
        if budget_bytes // self._page_bytes >= self._demand.full_pages:
            plan = place(streaming(self._demand, ()), {}).plan(self._demand.full_pages)
            return self._menu.finished(plan, budget_bytes, curves)
        slots = self._menu.slots(budget_bytes, self._streaming_floor_bytes) if self._menu.begins else None
        room = Room(self._menu, budget_bytes, slots, curves)
        known = [calibration] if calibration is not None else nominal(self._menu)
        found = self._searched(room, known, calibration is not None, is_draft=is_draft)
        kept = cheapest_kept(self._sets, room.pages) if not found or self._demand.reuses else None
        self._refuse_below_floor(budget_bytes)
        if not found and kept is None:
            kept = lengthen_prefixes(self._lowest, room.pages)
        if kept is not None:
            plan = room.finished(kept.plan(room.pages))
            found.append((sum(self.predicted_s(plan, one) for one in known), plan))
        return self._with_best_slots(least(found), room, known)

    def _with_best_slots(self, plan: Plan, room: Room, known: Sequence[Calibration]) -> Plan:
        """The same bytes divided otherwise: nothing else of the plan changes."""
        if plan.slots is None or room.slots is None:
            return plan
        sizes = self._menu.slot_sizes(room.slots.total_bytes)
        plans = [replace(plan, slots=replace(plan.slots, count=one.count, nbytes=one.nbytes)) for one in sizes]
        return least([(sum(self.predicted_s(each, one) for one in known), each) for each in plans])

    def _searched(
        self, room: Room, known: Sequence[Calibration], is_measured: bool, *, is_draft: bool
    ) -> list[tuple[float, Plan]]:
        """Small weights stream only where nothing else fits: a copy of one is mostly overhead."""
        sets = self._sets.fitting(room.pages)
        ahead_pages = max(1, self._usual_ahead_pages(room.pages))
        for small in (False, True):
            some = [chosen for chosen in sets if self._demand.any_small(chosen.stays) is small]
            found = Search(
                some,
                room,
                known,
                ahead_pages,
                parts=self._parts(is_measured),
                least_ahead_pages=0 if is_measured else ahead_pages,
                trials=MEASURED_TRIALS if is_measured and not is_draft else NOMINAL_TRIALS,
            ).run()
            if found:
                return found
        return []

    def _parts(self, is_measured: bool) -> tuple[float, ...]:
        """Of the spare pages, what goes to other rows. Without times, what streams comes before what is read in place:
        that makes the ring shorter, and a byte costs the same."""
        if is_measured and (self._menu.begins or self._menu.other_pages):
            return MEASURED_PARTS
        return PACKED_PARTS if self._menu.begins else (0.0,)

    def _refuse_below_floor(self, budget_bytes: int) -> None:
        slots_bytes = self._menu.least_slots_bytes
        # The exact floor takes time to find, which a budget well above it can do without.
        if surely_fits(self._sets, (budget_bytes - slots_bytes) // self._page_bytes):
            return
        if budget_bytes < self.floor_bytes:
            on_their_way = f", and {slots_bytes} bytes for packed ones on their way" if slots_bytes else ""
            raise BelowFloorError(
                f"the budget is {budget_bytes} bytes, but the floor is {self.floor_bytes} bytes: "
                f"{_reason(self._lowest)}{on_their_way}",
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

    def least_s(self, budget_bytes: int, calibration: Calibration | None) -> float:
        """By measured times; without, the sum over nominal machines."""
        plan = self.plan(budget_bytes, calibration, is_draft=True)
        known = [calibration] if calibration is not None else nominal(self._menu)
        return sum(self.predicted_s(plan, one) for one in known)

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        return predicted_s(plan, self._menu.schedules, calibration)


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
