"""One plan, one floor: for tests that need no planner of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.plan.candidates import Draft, Streaming, draft, least_ring
from penstock.plan.menu import Menu
from penstock.plan.menu_planner import FloorPlan
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.schedule import Schedule
from penstock.weight import Weight


def make_plan(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, budget_bytes: int, page_bytes: int
) -> Plan:
    return Planner(schedules, weights, page_bytes=page_bytes).plan(budget_bytes)


def placed_floor(schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int) -> FloorPlan:
    return Planner(schedules, weights, page_bytes=page_bytes).floor()


def full_bytes(schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int) -> int:
    return Planner(schedules, weights, page_bytes=page_bytes).full_bytes


def drafted_with(
    streaming: Streaming, menu: Menu, budget_pages: int, cap: int, ahead_pages: int, part: float = 0.0
) -> Draft | None:
    """With a ring that lets copies run so many pages ahead."""
    least_pages = least_ring(streaming, menu, budget_pages, cap, part)
    return None if least_pages is None else draft(streaming, menu, budget_pages, cap, least_pages + ahead_pages, part)
