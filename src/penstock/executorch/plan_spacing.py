"""Chooses the budgets that plans are made for ahead of time, so that taking the next smaller plan streams hardly more.

What counts is what a run moves over the link, and for packed weights also what it decodes. Where that is little, a page
more or less of budget changes it by a large fraction, so the plans lie close together. Where it is nothing, one plan
serves all budgets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.plan.plan import MethodPlan, Plan
from penstock.plan.tuning import COPY_OVERHEAD_BYTES, NOMINAL_DECODED_BYTES_PER_S, NOMINAL_LINK_BYTES_PER_S
from penstock.schedule import Schedule

# Percentages of the bytes of all weights. Budgets that people give are planned exactly.
ROUND_PERCENTS = (5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 95)
# The parts between these, the floor and everything. Within a part, each plan depends on the one before it.
MOST_PARTS = len(ROUND_PERCENTS) + 1
# Guessed distances are off by about this factor. One that turns out too long costs one more plan.
SURPLUS = 1.1


@dataclass(frozen=True)
class Spacing:
    """From one plan to the next larger one, the cost of a run falls to no less than 1 / `times`, or by no more than
    `part_of_weights` (at least the overhead of a copy), whichever leaves more room.

    A run reads every weight once on the device. On a GPU of 4.8 TB/s with a link of 55 GB/s, that takes as long as the
    link takes for 1/87 of the weights. So 1/2000 of the weights is 4% of the shortest possible run.
    """

    times: float
    part_of_weights: float

    def mark(self, nbytes: float, weight_bytes: int) -> float:
        """Maps an amount to a scale on which amounts that lie exactly one step apart differ by one."""
        least_bytes, even_bytes = self._bounds(weight_bytes)
        if nbytes <= even_bytes:
            return nbytes / least_bytes
        return (even_bytes / least_bytes) + math.log(nbytes / even_bytes, self.times)

    def amount(self, mark: float, weight_bytes: int) -> float:
        """The bytes that have this mark."""
        least_bytes, even_bytes = self._bounds(weight_bytes)
        even_mark = even_bytes / least_bytes
        return mark * least_bytes if mark <= even_mark else even_bytes * self.times ** (mark - even_mark)

    def _bounds(self, weight_bytes: int) -> tuple[float, float]:
        """The least distance, and the amount from which on the distance is a factor instead."""
        least_bytes = max(float(COPY_OVERHEAD_BYTES), self.part_of_weights * weight_bytes)
        return least_bytes, least_bytes / (1 - 1 / self.times)


def cost_bytes(plan: Plan, schedules: Sequence[Schedule]) -> float:
    """What a run of each method moves over the link, by copies and by kernels: one plan serves all methods. Decoding
    counts as what the link could move in that time.

    Tables that are gathered from are left out, because kernels read next to nothing of them.
    """
    return sum(_cost_bytes(method, schedule) for method, schedule in zip(plan.methods, schedules, strict=True))


def _cost_bytes(plan: MethodPlan, schedule: Schedule) -> float:
    read_in_place = (
        placement.in_place_bytes
        for placement in plan.placements
        if not schedule.access_by_number[placement.number].gathered
    )
    decoded_bytes = plan.warm.bytes_decoded * NOMINAL_LINK_BYTES_PER_S / NOMINAL_DECODED_BYTES_PER_S
    return plan.warm.bytes_streamed + sum(read_in_place) + decoded_bytes


class Planned(Protocol):
    """A plan, reduced to what it holds and what a run with it costs."""

    @property
    def device_bytes(self) -> int: ...
    @property
    def cost_bytes(self) -> float: ...


P = TypeVar("P", bound=Planned)
# Yields the budgets that it wants plans for, one after the other, is sent each plan, and returns those to keep.
Part = Generator[int, P | None, list[P]]


@dataclass(frozen=True)
class _At(Generic[P]):
    budget_bytes: int
    plan: P


def one_by_one(plan_at: Callable[[int], P]) -> Callable[[Sequence[Part[P]]], list[list[P]]]:
    def plans(part: Part[P]) -> list[P]:
        plan: P | None = None
        while True:
            try:
                budget_bytes = part.send(plan)
            except StopIteration as ended:
                return list(ended.value)
            plan = plan_at(budget_bytes)

    return lambda parts: list(map(plans, parts))


def spaced_plans(
    plans_of: Callable[[Sequence[Part[P]]], list[list[P]]],
    floor_bytes: int,
    full_bytes: int,
    weight_bytes: int,
    spacing: Spacing,
    *,
    page_bytes: int,
    at_once: int = 1,
) -> list[P]:
    """Plans from the floor to everything resident, both included, in the order of the budgets they were made for.

    `plans_of` serves the parts that it is given in any order, `at_once` of them at a time. The result is the same.
    """

    def asked(budget_bytes: int) -> Generator[int, P | None, list[P]]:
        plan = yield budget_bytes
        assert plan is not None
        return [plan]

    def between(low: _At[P], high: _At[P]) -> int | None:
        """The budget to plan for next; None if no budget in between would gain by a plan."""
        costs = low.plan.cost_bytes, high.plan.cost_bytes
        marks = spacing.mark(costs[0], weight_bytes), spacing.mark(costs[1], weight_bytes)
        gaps = marks[0] - marks[1]
        # The larger plan serves all budgets from its own bytes on.
        room_bytes = high.plan.device_bytes - low.budget_bytes
        if gaps <= 1 or room_bytes <= page_bytes:
            return None
        count = math.ceil(gaps * SURPLUS)
        middle_bytes = spacing.amount(marks[0] - gaps * (count // 2) / count, weight_bytes)
        part = (costs[0] - middle_bytes) / (costs[0] - costs[1])
        pages = min(max(1, round(room_bytes * part / page_bytes)), math.ceil(room_bytes / page_bytes) - 1)
        return low.budget_bytes + pages * page_bytes

    def stretch(low: _At[P], high: _At[P]) -> Part[P]:
        """The plans after the lower end, up to and including the upper one."""
        done, ahead = [low], [high]
        while ahead:
            wanted = between(done[-1], ahead[-1])
            if wanted is None:
                done.append(ahead.pop())
            else:
                (plan,) = yield from asked(wanted)
                ahead.append(_At(wanted, plan))
        return [each.plan for each in done[1:]]

    exact = (weight_bytes * percent // 100 // page_bytes * page_bytes for percent in ROUND_PERCENTS)
    budgets = sorted({floor_bytes, *(nbytes for nbytes in exact if floor_bytes < nbytes < full_bytes), full_bytes})
    ahead = dict(zip(budgets, plans_of([asked(each) for each in budgets]), strict=True)) if at_once > 1 else {}
    # From the largest down, to skip budgets that a plan already made serves.
    ends: list[_At[P]] = []
    for budget_bytes in reversed(budgets):
        if not ends or budget_bytes < ends[-1].plan.device_bytes or budget_bytes == floor_bytes:
            (plan,) = ahead.get(budget_bytes) or plans_of([asked(budget_bytes)])[0]
            ends.append(_At(budget_bytes, plan))
    ends.reverse()
    parts = plans_of([stretch(low, high) for low, high in itertools.pairwise(ends)])
    return [ends[0].plan, *itertools.chain.from_iterable(parts)]
