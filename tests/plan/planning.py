"""One plan, one floor: for tests that need no planner of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
