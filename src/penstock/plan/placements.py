"""How accesses may reach their weights: copied ahead, read in host memory or on both sides, or whichever suits each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from penstock.errors import BelowFloorError
from penstock.placement_names import PLANNED
from penstock.plan.below_copying import BelowCopying, below_copying
from penstock.plan.calibration import Calibration
from penstock.plan.demand import Demand, small_copy_bytes
from penstock.plan.direct import IsDirect, read_directly_by_default, stand_ins, with_direct
from penstock.plan.plan import Plan
from penstock.plan.planner import FloorPlan, Planner
from penstock.plan.prefixes import host_curves
from penstock.plan.simulator import predicted_s
from penstock.plan.split_choice import SplitChoice
from penstock.plan.tuning import DRAFTS_KEPT, SIZES_TRIED
from penstock.schedule import Access, Schedule
from penstock.weight import Weight


class PlacementPlanner:
    """The plans of one program in one placement at different budgets, with the interface of Planner."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        weights: Mapping[str, Weight],
        *,
        page_bytes: int,
        placement: str,
        can_split: bool = True,
    ) -> None:
        """`can_split`: whether there is a kernel that reads one weight on both sides."""
        if placement not in PLANNED:
            raise ValueError(f"placement is {placement!r}; it must be one of {', '.join(map(repr, PLANNED))}")
        if placement == "split" and not can_split:
            raise ValueError(
                "placement is 'split', which needs a kernel that reads a weight on both sides; there is none"
            )
        self._schedules = tuple(schedules)
        self._weights = weights
        self._page_bytes = page_bytes
        self._placement = placement
        self._can_split = can_split
        # The last that was asked for, and by which times.
        self._below: tuple[Calibration | None, BelowCopying | None] | None = None

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that `plan` accepts, whatever was measured."""
        return self.floor_for(None)

    def floor_for(self, calibration: Calibration | None) -> int:
        """The smallest budget that `plan` accepts with these times."""
        below = self._below_copying(calibration)
        return self.copying_bytes if below is None else below.floor_bytes

    @property
    def copying_bytes(self) -> int:
        """The smallest budget with which everything that does not fit is copied, but for what is only gathered from."""
        return self._lowest.floor_bytes

    @property
    def full_bytes(self) -> int:
        """Device bytes of the plan that holds everything. A larger budget buys nothing."""
        return self._usual.full_bytes

    def floor(self) -> FloorPlan:
        below = self._below_copying(None)
        return self._lowest.floor() if below is None else below.floor()

    def plan(self, budget_bytes: int, calibration: Calibration | None = None) -> Plan:
        """The plan that takes the least time within the budget, by measured times or on nominal machines.

        Raises BelowFloorError where no plan is safe and still overlaps.
        """
        below = self._below_copying(calibration) if budget_bytes < self.copying_bytes else None
        if below is not None and below.floor_bytes <= budget_bytes:
            plans = [below.choice.plan(budget_bytes, calibration)]
        else:
            usual = self._usual if budget_bytes >= self._usual.floor_bytes else self._lowest
            plans = [usual.plan(budget_bytes, calibration)]
        if self._placement != "auto" or calibration is None or not calibration.direct_step_s:
            return plans[0]
        # Of a method that was not timed nobody knows what it would lose: with many rows, nearly everything.
        for schedule in self._schedules:
            if schedule.method not in calibration.step_s or schedule.method not in calibration.direct_step_s:
                raise ValueError(f"reads in place were timed, but not in method {schedule.method!r}: time all or none")
        for choice in self._with_more_in_place:
            try:
                plans.append(choice.plan(budget_bytes, calibration))
            except BelowFloorError:
                continue  # fewer weights to place are not always easier to place; then it is no choice here
        plans += self._split_plans(budget_bytes, calibration)
        return min(plans, key=lambda plan: self.predicted_s(plan, calibration))

    def _below_copying(self, calibration: Calibration | None) -> BelowCopying | None:
        """For "auto", where copying does not fit: what takes less memory and not much more time, if anything does.

        Our own kernel reads each row once, so splitting is judged with or without times. How often any other kernel
        reads what it is given nobody knows before it was timed.
        """
        if self._placement != "auto":
            return None
        timed = calibration if calibration is not None and calibration.direct_step_s else None
        if self._below is None or self._below[0] != timed:
            choices = [*self._with_more_split[-1:], *(self._with_more_in_place[-1:] if timed is not None else ())]
            found = below_copying(self._lowest, choices, self._schedules, self._page_bytes, timed)
            self._below = timed, found
        return self._below[1]

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        return predicted_s(plan, self._schedules, calibration)

    @cached_property
    def _usual(self) -> DirectChoice | SplitChoice:
        return self._split_from(1) if self._placement == "split" else self._choice(self._may_be_direct)

    @cached_property
    def _lowest(self) -> DirectChoice | SplitChoice:
        """Fewer weights to place are not always easier to place: in a cycle of few steps copying all may need less."""
        if self._placement in ("stream", "in-place"):
            return self._usual
        streamed = self._choice(lambda access: False)
        return streamed if streamed.floor_bytes < self._usual.floor_bytes else self._usual

    @cached_property
    def _with_more_in_place(self) -> list[DirectChoice]:
        """Weights from some size on are read in place as well; from the smallest size on, all of them are."""
        sizes = {weight.nbytes for weight in self._weights.values() if weight.nbytes}
        return [self._choice(self._in_place_from(size)) for size in _sizes_tried(sizes)]

    @cached_property
    def _with_more_split(self) -> list[SplitChoice]:
        """The same for weights that can be split; all others as usual."""
        accesses = (access for schedule in self._schedules for access in schedule.accesses)
        sizes = {self._weights[access.weight].nbytes for access in accesses if access.linear and not access.pinned}
        return [self._split_from(size) for size in _sizes_tried(sizes - {0})] if self._can_split else []

    def _split_plans(self, budget_bytes: int, calibration: Calibration) -> list[Plan]:
        """Memory divided between prefixes and everything else in many ways: the fastest.

        That is found with everything else planned without the times of steps, which takes a tenth as long.
        """
        curves = host_curves(self._schedules, calibration)
        drafts = [
            (choice.divided(budget_bytes, rest_bytes, None, curves), choice, rest_bytes)
            for choice in self._with_more_split
            for rest_bytes in choice.divisions(budget_bytes)
        ]
        drafts.sort(key=lambda draft: self.predicted_s(draft[0], calibration))
        return [
            plan
            for draft, choice, rest_bytes in drafts[:DRAFTS_KEPT]
            for plan in (draft, choice.divided(budget_bytes, rest_bytes, calibration, curves))
        ]

    def _split_from(self, nbytes: int) -> SplitChoice:
        def may_be_split(access: Access) -> bool:
            return access.linear and not access.pinned and self._weights[access.weight].nbytes >= nbytes

        return SplitChoice(
            self._schedules,
            self._weights,
            self._page_bytes,
            may_be_direct=self._may_be_direct,
            may_be_split=may_be_split,
        )

    def _in_place_from(self, nbytes: int) -> IsDirect:
        def is_direct(access: Access) -> bool:
            large = self._weights[access.weight].nbytes >= nbytes
            return self._may_be_direct(access) or (large and not access.pinned)

        return is_direct

    def _may_be_direct(self, access: Access) -> bool:
        nbytes = self._weights[access.weight].nbytes
        if self._placement == "in-place":
            return bool(nbytes) and not access.pinned
        # Small weights share pages with others and are never copied: nothing is gained by reading them in place.
        is_worth_it = nbytes >= max(small_copy_bytes(self._page_bytes), 1)
        return self._placement in ("auto", "split") and is_worth_it and read_directly_by_default(access)

    def _choice(self, may_be_direct: IsDirect) -> DirectChoice:
        return DirectChoice(self._schedules, self._weights, self._page_bytes, may_be_direct)


def _sizes_tried(sizes: Collection[int]) -> list[int]:
    largest_first = sorted(sizes, reverse=True)
    return list(dict.fromkeys([*largest_first[:SIZES_TRIED], *largest_first[-1:]]))


class DirectChoice:
    """The plans where given accesses are read in place, unless there is memory to spare for their weights."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        weights: Mapping[str, Weight],
        page_bytes: int,
        may_be_direct: Callable[[Access], bool],
    ) -> None:
        self._schedules = schedules
        self._weights = weights
        self._page_bytes = page_bytes
        self._may_be_direct = may_be_direct
        self._planners: dict[frozenset[str], Planner] = {}

    @property
    def floor_bytes(self) -> int:
        return self._planner(frozenset()).floor_bytes

    @property
    def full_bytes(self) -> int:
        return self._demand.full_pages * self._page_bytes

    def floor(self) -> FloorPlan:
        found = self._planner(frozenset()).floor()
        return replace(found, plan=self._whole(found.plan, frozenset()))

    def plan(self, budget_bytes: int, calibration: Calibration | None) -> Plan:
        held = self._held(budget_bytes)
        return self._whole(self._planner(held).plan(budget_bytes, calibration), held)

    def _held(self, budget_bytes: int) -> frozenset[str]:
        """Of the weights that need no device memory, those that get some: when there is more than the rest can use."""
        demand = self._demand
        room_bytes = budget_bytes // self._page_bytes * self._page_bytes
        room_bytes -= sum(demand.held_bytes[name] for name in demand.nbytes if name not in self._in_place_priority)
        held: list[str] = []
        if room_bytes >= 0:
            for name in self._in_place_priority:
                if demand.held_bytes[name] <= room_bytes:
                    room_bytes -= demand.held_bytes[name]
                    held.append(name)
        return frozenset(held)

    @cached_property
    def _demand(self) -> Demand:
        return Demand.of(self._schedules, self._weights, self._page_bytes)

    @cached_property
    def _in_place_priority(self) -> dict[str, None]:
        """Weights that all accesses may read directly, those first that gain the most by being held.

        A kernel that reads all of a weight gains more than one that gathers; and twice read is twice gained.
        """
        accesses = [access for schedule in self._schedules for access in schedule.accesses]
        kept = {access.weight for access in accesses if not self._may_be_direct(access)}
        read_whole = {access.weight for access in accesses if not access.gathered}
        times = Counter(access.weight for access in accesses if access.weight not in kept)
        order = sorted(times, key=lambda name: (name not in read_whole, -times[name], -self._weights[name].nbytes))
        return dict.fromkeys(order)

    def _is_direct(self, held: Collection[str]) -> IsDirect:
        return lambda access: access.weight not in held and self._may_be_direct(access)

    def _planner(self, held: frozenset[str]) -> Planner:
        if held not in self._planners:
            schedules, weights = stand_ins(self._schedules, self._weights, self._is_direct(held))
            self._planners[held] = Planner(schedules, weights, page_bytes=self._page_bytes)
        return self._planners[held]

    def _whole(self, plan: Plan, held: frozenset[str]) -> Plan:
        return with_direct(plan, self._schedules, self._weights, self._is_direct(held))
