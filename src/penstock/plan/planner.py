"""The planner: turns schedules, sizes, a placement and a budget into a plan. It chooses among menus."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import BelowFloorError
from penstock.placement_names import PLANNED
from penstock.plan.calibration import Calibration
from penstock.plan.experts import HitRates
from penstock.plan.floor import check_schedules
from penstock.plan.in_place import Takes, read_directly_by_default
from penstock.plan.menu import Menu
from penstock.plan.menu_planner import FloorPlan, MenuPlanner
from penstock.plan.packed import Begins
from penstock.plan.pages import small_copy_bytes
from penstock.plan.plan import Plan
from penstock.plan.tuning import DRAFTS_KEPT, SIZES_TRIED, WORTHWHILE_TIMES
from penstock.schedule import Access, Schedule
from penstock.weight import Weight


@dataclass(frozen=True)
class BelowCopying:
    """What "auto" does with a budget too small for copying: it reads weights over the link, where that is worth it."""

    planner: MenuPlanner
    # The smallest budget at which that is worth it.
    floor_bytes: int

    def floor(self) -> FloorPlan:
        found = self.planner.floor()
        plan = self.planner.plan(self.floor_bytes, None)
        return replace(found, floor_bytes=self.floor_bytes, plan=plan, resident_bytes=plan.resident_bytes)


class Planner:
    """The plans of one program in one placement at different budgets."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        weights: Mapping[str, Weight],
        *,
        page_bytes: int,
        placement: str = "stream",
        can_split: bool = True,
        begins: Begins | None = None,
        hit_rates: Mapping[str, HitRates] | None = None,
    ) -> None:
        """`can_split`: whether there is a kernel that reads one weight on both sides. `begins`: of packed weights. They
        allow only "auto" and "stream", because no kernel reads them in place. `hit_rates`: measured, of experts."""
        check_schedules(schedules, weights, granularity_bytes=page_bytes)
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
        self._begins = begins or {}
        self._hit_rates = hit_rates or {}
        if self._begins and placement not in ("auto", "stream"):
            raise ValueError(f"placement is {placement!r}, and {min(self._begins)!r} is packed")
        self._can_split = can_split and not self._begins
        # The last result, and the times it was computed for.
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
        """The smallest budget at which everything that does not fit is copied, except what is only gathered from."""
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
        try:
            plan = self._usual.plan(budget_bytes, calibration)
        except BelowFloorError:
            plan = self._tight_plan(budget_bytes, calibration)
        if self._placement != "auto" or self._begins:
            return plan
        others = self._over_the_link(budget_bytes, calibration)
        return min([plan, *others], key=lambda plan: self.seconds(plan, calibration)) if others else plan

    def _tight_plan(self, budget_bytes: int, calibration: Calibration | None) -> Plan:
        below = self._below_copying(calibration) if budget_bytes < self.copying_bytes else None
        if below is None:
            return self._lowest.plan(budget_bytes, calibration)
        if budget_bytes < below.floor_bytes and below.planner.floor_bytes < below.floor_bytes:
            raise BelowFloorError(
                f"the budget is {budget_bytes} bytes, but the floor is {below.floor_bytes} bytes: with less, reading "
                f"over the link takes too long beside copying, for which the floor is {self.copying_bytes} bytes",
                budget_bytes=budget_bytes,
                floor_bytes=below.floor_bytes,
            )
        return below.planner.plan(budget_bytes, calibration)

    def seconds(self, plan: Plan, calibration: Calibration | None) -> float:
        """What plans are compared by: methods count as often as they run, and expert misses are included."""
        return self._widest.seconds(plan, calibration)

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        """The time of one run of each method."""
        return self._widest.predicted_s(plan, calibration)

    def lower_placements(self) -> dict[str, int]:
        """Floors of the placements that read weights in host memory, if lower than this placement's own floor."""
        splits = self._can_split and any(access.linear for one in self._schedules for access in one.accesses)
        found = {"in-place": self._menu(self._whole).floor_bytes}
        if splits:
            found["split"] = self._split_from(1).floor_bytes
        return {placement: nbytes for placement, nbytes in found.items() if nbytes < self.floor_bytes}

    # ---- which menus there are

    @cached_property
    def _usual(self) -> MenuPlanner:
        if self._placement == "split":
            return self._split_from(1)
        return self._menu(self._whole if self._placement == "in-place" else self._gathers_in_place)

    @cached_property
    def _lowest(self) -> MenuPlanner:
        """Placing fewer weights is not always easier: in a cycle of few steps, copying all of them may need less."""
        if self._placement in ("stream", "in-place"):
            return self._usual
        streamed = self._menu(lambda access: False)
        return streamed if streamed.floor_bytes < self._usual.floor_bytes else self._usual

    @property
    def _widest(self) -> MenuPlanner:
        """The planner whose menu has times for everything that our plans may read over the link."""
        return self._with_more_split[-1] if self._with_more_split else self._usual

    def _over_the_link(self, budget_bytes: int, calibration: Calibration | None) -> list[Plan]:
        """Plans of menus that read more over the link: a draft for each, and full plans for the best drafts.

        Our own kernel reads each row once, so splitting is judged with or without times. How often other kernels read
        their operands is unknown until it is timed.
        """
        menus = self._with_more_split[-1:]
        if calibration is not None and calibration.direct_step_s:
            # What an untimed method would lose is unknown: with many rows, nearly everything.
            for schedule in self._schedules:
                if schedule.method not in calibration.step_s or schedule.method not in calibration.direct_step_s:
                    raise ValueError(
                        f"reads in place were timed, but not in method {schedule.method!r}: time all or none"
                    )
            menus = [*self._with_more_in_place, *self._with_more_split]
        drafts: list[tuple[float, int, MenuPlanner]] = []
        for index, one in enumerate(menus):
            try:
                plan = one.plan(budget_bytes, calibration, is_draft=True)
            except BelowFloorError:
                continue  # placing fewer weights is not always easier; then it is no choice here
            drafts.append((self.seconds(plan, calibration), index, one))
        return [one.plan(budget_bytes, calibration) for _, _, one in sorted(drafts)[:DRAFTS_KEPT]]

    @cached_property
    def _with_more_in_place(self) -> list[MenuPlanner]:
        """Weights from some size on are read in place as well; from the smallest size on, that is all of them."""
        sizes = {weight.nbytes for weight in self._weights.values() if weight.nbytes}
        return [self._menu(self._in_place_from(size)) for size in _sizes_tried(sizes)]

    @cached_property
    def _with_more_split(self) -> list[MenuPlanner]:
        """The same for weights that can be split; all others as usual."""
        accesses = (access for schedule in self._schedules for access in schedule.accesses)
        sizes = {self._weights[access.weight].nbytes for access in accesses if access.linear and not access.pinned}
        return [self._split_from(size) for size in _sizes_tried(sizes - {0})] if self._can_split else []

    def _below_copying(self, calibration: Calibration | None) -> BelowCopying | None:
        """For "auto", where copying does not fit: the planner that takes less memory and not much more time, if any."""
        if self._placement != "auto" or self._begins:
            return None
        timed = calibration if calibration is not None and calibration.direct_step_s else None
        if self._below is None or self._below[0] != timed:
            choices = [*self._with_more_split[-1:], *(self._with_more_in_place[-1:] if timed is not None else ())]

            # One yardstick for all: which methods a menu counts as frequent depends on what streams in it.
            def least_s(one: MenuPlanner, budget_bytes: int) -> float:
                return self.seconds(one.plan(budget_bytes, timed, is_draft=True), timed)

            self._below = timed, _below_copying(self._lowest, choices, self._page_bytes, least_s)
        return self._below[1]

    def _menu(self, in_place: Takes, split: Takes = lambda access: False) -> MenuPlanner:
        menu = Menu(self._schedules, self._weights, self._page_bytes, in_place, split, self._begins, self._hit_rates)
        return MenuPlanner(menu)

    # ---- who may take which row

    def _whole(self, access: Access) -> bool:
        return bool(self._weights[access.weight].nbytes) and not access.pinned

    def _gathers_in_place(self, access: Access) -> bool:
        if self._placement not in ("auto", "split") or access.weight in self._begins:
            return False
        # Small weights share pages with others and are never copied, so reading them in place gains nothing.
        is_worth_it = self._weights[access.weight].nbytes >= max(small_copy_bytes(self._page_bytes), 1)
        return is_worth_it and read_directly_by_default(access)

    def _in_place_from(self, nbytes: int) -> Takes:
        def is_direct(access: Access) -> bool:
            large = self._weights[access.weight].nbytes >= nbytes
            return self._gathers_in_place(access) or (large and not access.pinned)

        return is_direct

    def _split_from(self, nbytes: int) -> MenuPlanner:
        def is_split(access: Access) -> bool:
            return access.linear and not access.pinned and self._weights[access.weight].nbytes >= nbytes

        return self._menu(self._gathers_in_place, is_split)


def _below_copying(
    copying: MenuPlanner,
    others: Sequence[MenuPlanner],
    page_bytes: int,
    least_s: Callable[[MenuPlanner, int], float],
) -> BelowCopying | None:
    """The planner among `others` with the lowest floor that is worth having; None if there is none below copying's.
    `least_s`: the time of a draft at a budget, in seconds."""
    lower = [one for one in others if one.floor_bytes < copying.floor_bytes]
    if not lower:
        return None
    limit_s = WORTHWHILE_TIMES * least_s(copying, copying.floor_bytes)
    found: BelowCopying | None = None
    for one in lower:
        most_bytes = copying.floor_bytes if found is None else found.floor_bytes

        def is_worth_it(pages: int, one: MenuPlanner = one) -> bool:
            try:
                return least_s(one, pages * page_bytes) <= limit_s
            except BelowFloorError:
                return False

        least = _first_that(is_worth_it, -(-one.floor_bytes // page_bytes), -(-most_bytes // page_bytes))
        if least is not None:
            found = BelowCopying(one, max(one.floor_bytes, least * page_bytes))
    return found


def _first_that(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The lowest number in [low, high) for which `holds` is true. More memory never makes it false again."""
    if low >= high:
        return None
    if holds(low):  # mostly so, and then one look is enough
        return low
    if not holds(high - 1):
        return None
    while low < high - 1:
        middle = (low + high - 1) // 2
        if holds(middle):
            high = middle + 1
        else:
            low = middle + 1
    return high - 1


def _sizes_tried(sizes: Collection[int]) -> list[int]:
    largest_first = sorted(sizes, reverse=True)
    return list(dict.fromkeys([*largest_first[:SIZES_TRIED], *largest_first[-1:]]))


def lower_placements_text(found: Mapping[str, int], beside_bytes: int = 0) -> str:
    """A sentence to append to a refusal of placement="auto"; empty if no placement needs less. `beside_bytes`: what the
    amount that was refused has to cover besides weights."""
    if not found:
        return ""
    needs = {placement: nbytes + beside_bytes for placement, nbytes in found.items()}
    listed = " and ".join(f'placement="{placement}" needs {nbytes} bytes' for placement, nbytes in needs.items())
    return f'. That is for placement="auto"; {listed}, because kernels then read weights over the link'
