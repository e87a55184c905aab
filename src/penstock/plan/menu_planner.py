"""The plans of one menu at different budgets. Pure and deterministic; the authority on the menu's floor.

The way of a weight: menu.py says which rows it may take, candidates.py how much of it streams, ring.py where that lies;
search.py picks the fastest, and assembly.py writes the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration
from penstock.plan.candidates import CandidateSets, Draft, Streaming
from penstock.plan.menu import Menu
from penstock.plan.nominal import nominal, with_times_in_place
from penstock.plan.packed import SlotSizes, least_slots_bytes
from penstock.plan.pages import Demand
from penstock.plan.plan import Plan
from penstock.plan.search import Found, Judge, Search, least
from penstock.plan.tuning import MANY_ACCESSES, SMALLER_BUDGETS


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
    """What the plans have in common is computed once."""

    def __init__(self, menu: Menu) -> None:
        self._menu = menu
        self._demand = menu.demand
        self._sets = CandidateSets(menu.demand)
        self._page_bytes = menu.page_bytes
        # By budget, in pages.
        self._known: tuple[Judge, dict[int, Found]] | None = None

    @cached_property
    def _lowest(self) -> Draft:
        with _collector_paused():
            return self._sets.lowest()

    @property
    def _streaming_floor_bytes(self) -> int:
        """The floor without the slots that packed weights pass through."""
        return self._lowest.total_pages * self._page_bytes

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that `plan` accepts."""
        if not self._lowest.ring_pages:
            return self._streaming_floor_bytes
        full_bytes = self._demand.full_pages * self._page_bytes
        return min(self._streaming_floor_bytes + least_slots_bytes(self._menu.begins, self._page_bytes), full_bytes)

    @cached_property
    def full_bytes(self) -> int:
        """Device bytes of the plan that holds everything. A larger budget buys nothing."""
        return self._menu.full_pages * self._page_bytes

    def floor(self) -> FloorPlan:
        if self._menu.begins:
            plan = self.plan(self.floor_bytes)
        else:
            plan = self._menu.finished(self._lowest.laid(), self.floor_bytes, {})
        method, step_index, names = self._lowest.worst_step()
        return FloorPlan(self.floor_bytes, plan, plan.resident_bytes, plan.ring_bytes, method, step_index, names)

    def plan(self, budget_bytes: int, calibration: Calibration | None = None, *, is_draft: bool = False) -> Plan:
        """The plan that takes the least time within the budget, by measured times or on nominal machines.

        Raises BelowFloorError where no plan is safe and still overlaps. A draft is judged by the same times, but fewer
        candidates are tried for it.
        """
        with _collector_paused():
            if budget_bytes >= self.full_bytes:
                return _resident(self._menu.whole_demand)
            judge = self._judge(calibration, is_draft=is_draft)
            if budget_bytes // self._page_bytes >= self._demand.full_pages:
                return self._menu.finished(_resident(self._demand), budget_bytes, judge.host_times)
            self._refuse_below_floor(budget_bytes)
            return self._fastest(judge, budget_bytes // self._page_bytes)

    def _judge(self, calibration: Calibration | None, *, is_draft: bool = False) -> Judge:
        if calibration is None:
            return Judge(self._menu, nominal(self._menu), False, self._menu.host_times(None), is_draft)
        known = with_times_in_place(self._menu, calibration) if self._menu.splits else calibration
        return Judge(self._menu, [known], True, self._menu.host_times(known), is_draft)

    def _fastest(self, judge: Judge, budget_pages: int) -> Plan:
        """The fastest of the plans for this budget and, where accesses are few, for smaller ones. Which rings come out
        even is luck then, and more memory must not take longer."""
        best = self._found(judge, budget_pages)
        # What other rows get of a budget does not depend on luck.
        count = SMALLER_BUDGETS.of(self._demand.access_count**3) if len(judge.parts) == 1 else 0
        for pages in range(budget_pages - 1, budget_pages - 1 - count, -1):
            smaller_bytes = pages * self._page_bytes
            if smaller_bytes < self.floor_bytes or judge.bound_s(smaller_bytes) >= best.seconds:
                break
            best = least([best, self._found(judge, pages)])
        return best.plan

    def _found(self, judge: Judge, budget_pages: int) -> Found:
        """Results by the latest times are kept: whoever asks for one budget often asks for the next."""
        if self._known is None or not self._known[0].judges_as(judge):
            self._known = judge, {}
        found = self._known[1]
        if budget_pages not in found:
            if len(found) > SMALLER_BUDGETS.most:
                del found[next(iter(found))]  # the oldest: a plan takes as much memory as the program has accesses
            found[budget_pages] = self._searched(judge, budget_pages * self._page_bytes)
        return found[budget_pages]

    def _searched(self, judge: Judge, budget_bytes: int) -> Found:
        slots = self._menu.slots(budget_bytes, self._streaming_floor_bytes) if self._menu.begins else []
        room_pages = (budget_bytes - (slots[0].total_bytes if slots else 0)) // self._page_bytes
        expert_pages = 0
        if self._menu.streamed_experts:
            expert_pages = self._menu.pages_for_experts(room_pages, self._lowest.total_pages)
        best = self._searched_beside(judge, budget_bytes, slots, room_pages, expert_pages)
        # The pages kept for slots are a guess: how long the ring gets, and what slots save then, is known only now.
        is_guess = expert_pages > 0 and not judge.is_draft
        if is_guess and (self._demand.access_count <= MANY_ACCESSES or self._tokens_copy(best.plan)):
            best = least([best, self._searched_beside(judge, budget_bytes, slots, room_pages, 0)])
        return best

    def _tokens_copy(self, plan: Plan) -> bool:
        return any(plan.method(name).copies for name in self._menu.runs)

    def _searched_beside(
        self, judge: Judge, budget_bytes: int, slots: Sequence[SlotSizes], room_pages: int, expert_pages: int
    ) -> Found:
        """Small weights stream only where nothing else fits: a copy of one is mostly overhead."""
        room_pages -= expert_pages
        laid = self._sets.kept(room_pages)
        sets = [*self._sets.fitting(room_pages), *(one.streaming for one in laid)]
        for is_small in (False, True):
            some = [one for one in sets if self._demand.any_small(one.stays) is is_small]
            some_laid = [one for one in laid if self._demand.any_small(one.suffixes) is is_small]
            found = Search(judge, budget_bytes, slots, some, some_laid, expert_pages).run()
            if found:
                break
        else:
            more_pages = room_pages - self._lowest.total_pages
            lowest = replace(self._lowest, ring_pages=self._lowest.ring_pages + more_pages)
            found = Search(judge, budget_bytes, slots, [], [lowest], expert_pages).run()
        best = least(found)
        if best.plan.slots is None:
            return best
        # The same bytes divided into slots differently: nothing else of the plan changes.
        divided = [replace(best.plan.slots, count=one.count, nbytes=one.nbytes) for one in slots]
        plans = [replace(best.plan, slots=one) for one in divided]
        return least([Found(judge.seconds(plan), plan) for plan in plans])

    def _refuse_below_floor(self, budget_bytes: int) -> None:
        slots_bytes = least_slots_bytes(self._menu.begins, self._page_bytes)
        if self._sets.surely_fits((budget_bytes - slots_bytes) // self._page_bytes):
            return
        if budget_bytes < self.floor_bytes:
            raise BelowFloorError(
                f"the budget is {budget_bytes} bytes, but the floor is {self.floor_bytes} bytes: "
                f"{self._floor_reason(slots_bytes)}",
                budget_bytes=budget_bytes,
                floor_bytes=self.floor_bytes,
            )

    def _floor_reason(self, slots_bytes: int) -> str:
        """Terms that add up to the floor."""
        if not self._lowest.ring_pages:
            return _reason(self._lowest)
        if self.floor_bytes < self._streaming_floor_bytes + slots_bytes:
            return f"{self.floor_bytes} bytes for all weights, resident (pages of {self._page_bytes} bytes)"
        on_their_way = f", and {slots_bytes} bytes for packed ones on their way" if slots_bytes else ""
        return f"{_reason(self._lowest)}{on_their_way}"

    def seconds(self, plan: Plan, calibration: Calibration | None) -> float:
        """What plans are compared by: measured times, or else the sum over all nominal machines."""
        return self._judge(calibration).seconds(plan)

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        return self._judge(calibration).predicted_s(plan)


def _resident(demand: Demand) -> Plan:
    return Draft(Streaming.of(demand, ()), {}, 0).laid()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes a few hundred thousand objects and no cycles. Searching them takes a quarter of its time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _reason(lowest: Draft) -> str:
    """What sets the floor."""
    demand, suffixes = lowest.streaming.demand, lowest.suffixes
    held_bytes = lowest.streaming.resident_pages(suffixes) * demand.page_bytes
    count = len(demand.nbytes) - len(suffixes)
    held = f"{held_bytes} bytes for {count} resident weight{'' if count == 1 else 's'}"
    method, step_index, names = lowest.worst_step()
    pages = f"(pages of {demand.page_bytes} bytes)"
    if method is None:
        return f"{held} {pages}"
    listed = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{held} and {lowest.ring_pages * demand.page_bytes} bytes for step {step_index} of method {method!r}, during "
        f"which {listed} must be on the device or on their way {pages}"
    )
