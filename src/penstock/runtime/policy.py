"""The two policies: planned residency, and the least recently used. Each turns a budget into what the core executes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import BelowFloorError, PenstockError
from penstock.plan.calibration import Calibration
from penstock.plan.check import check_plan
from penstock.plan.experts import HitRates, taken_together
from penstock.plan.floor import floor_bytes
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner, lower_placements_text
from penstock.plan.simulator import in_place_by_step
from penstock.program import Program
from penstock.runtime.driver import Driver
from penstock.runtime.packed_weights import PackedWeights
from penstock.runtime.records import Numbers, lru_numbers, plan_numbers


@dataclass(frozen=True)
class InstalledPlan:
    """What a policy makes of a budget."""

    program: Program
    numbers: Numbers
    plan: Plan | None

    def copied_weight(self, method_index: int, index: int) -> str:
        """The weight that copy `index` moves, as the core numbers copies."""
        if self.plan is None:
            return self.program.weights[index].name
        return self.plan.methods[method_index].copies[index].piece.weight


class Policy(ABC):
    def __init__(
        self,
        program: Program,
        driver: Driver,
        packed: PackedWeights,
        placement: str,
        *,
        can_split: bool,
        is_staged: bool,
    ) -> None:
        """`is_staged`: a cap on host memory, so no weight stays there."""
        self._program = program
        self._packed = packed
        self._placement = placement
        self._can_split = can_split
        self._is_staged = is_staged
        self._driver = driver
        self._page_bytes = driver.page_bytes
        self._schedules = [method.schedule for method in program.methods]
        self._weights = {weight.name: weight for weight in program.weights}

    @abstractmethod
    def floor_for(self, calibration: Calibration | None) -> int:
        """The smallest budget, given what was measured."""

    @property
    @abstractmethod
    def full_bytes(self) -> int:
        """With this much everything stays on the device; more buys nothing."""

    @abstractmethod
    def arrange(self, budget_bytes: int, calibration: Calibration | None) -> InstalledPlan: ...

    @property
    def copying_bytes(self) -> int:
        """Below this budget, weights are read over the link instead of copied; 0 if the budget does not decide that."""
        return 0

    @contextmanager
    def naming_lower_placements(self, is_allowed: Callable[[str], bool], beside_bytes: int = 0) -> Iterator[None]:
        """If a budget is refused inside the block, the error also names the placements that need less, of those that
        go with the other options. `beside_bytes`: what a total has to cover besides weights; 0 for a budget."""
        try:
            yield
        except BelowFloorError as refusal:
            found = {name: nbytes for name, nbytes in self._lower_placements().items() if is_allowed(name)}
            refusal.args = (f"{refusal}{lower_placements_text(found, beside_bytes)}",)
            raise

    def _lower_placements(self) -> dict[str, int]:
        return {}


class PlannedPolicy(Policy):
    # The measured hit rates of experts, by weight of their bank.
    hit_rates: Mapping[str, HitRates] = {}

    @cached_property
    def _planner(self) -> Planner:
        return Planner(
            self._schedules,
            self._weights,
            page_bytes=self._page_bytes,
            placement=self._placement,
            can_split=self._can_split,
            begins=self._packed.begins,
            hit_rates=self.hit_rates,
        )

    @cached_property
    def taken_together(self) -> dict[str, tuple[str, ...]]:
        """For each weight of experts, the weights whose experts are taken by the same index."""
        return taken_together(self._schedules, self._weights)

    def learn(self, hit_rates: Mapping[str, HitRates]) -> None:
        """Makes plans from now on with these hit rates."""
        if hit_rates:
            self.hit_rates = hit_rates
            vars(self).pop("_planner", None)

    def floor_for(self, calibration: Calibration | None) -> int:
        return self._planner.floor_for(calibration)

    @property
    def full_bytes(self) -> int:
        return self._planner.full_bytes

    @property
    def copying_bytes(self) -> int:
        return self._planner.copying_bytes if self._placement == "auto" else 0

    def arrange(self, budget_bytes: int, calibration: Calibration | None) -> InstalledPlan:
        return self._proved(self._planner.plan(budget_bytes, calibration), budget_bytes)

    def _proved(self, plan: Plan, budget_bytes: int) -> InstalledPlan:
        """The only way from a plan to what a session installs, so the check has seen every plan."""
        check_plan(
            plan,
            self._schedules,
            self._weights,
            budget_bytes=budget_bytes,
            packed=self._packed.begins,
            is_staged=self._is_staged,
        )
        return InstalledPlan(self._program, plan_numbers(plan, self._weights), plan)

    def seconds(self, plan: Plan, calibration: Calibration) -> float:
        """The time by which plans are compared."""
        return self._planner.seconds(plan, calibration)

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        return self._planner.predicted_s(plan, calibration)

    def _lower_placements(self) -> dict[str, int]:
        # "stream" was asked for by name, or "auto" became it because weights cannot be read in place.
        return self._planner.lower_placements() if self._placement == "auto" and not self._packed.begins else {}

    def arrange_in_place(self) -> InstalledPlan:
        """A plan that reads everything in place, whatever the budget, to measure how long that takes."""
        planner = self._planner_as("in-place")
        return self._proved(planner.plan(planner.floor_bytes), planner.floor_bytes)

    def arrange_to_time_steps(self, plan: Plan, budget_bytes: int) -> InstalledPlan | None:
        """A plan to time steps with their weights on the device: it copies what `plan` reads over the link. None if
        `plan` itself will do."""
        steps = [
            step
            for method, schedule in zip(plan.methods, self._schedules, strict=True)
            for step in in_place_by_step(method, schedule)
        ]
        if not any(step.nbytes for step in steps):
            return None
        planner = self._planner_as("auto")
        if budget_bytes < planner.floor_bytes:
            raise PenstockError(
                f"calibrate() times steps with their weights on the device, and copying them there takes "
                f"{planner.floor_bytes} bytes; the budget is {budget_bytes}. Calibrate with a larger one, and call "
                "set_budget() then"
            )
        return self._proved(planner.plan(budget_bytes), budget_bytes)

    def _planner_as(self, placement: str) -> Planner:
        return Planner(
            self._schedules,
            self._weights,
            page_bytes=self._page_bytes,
            placement=placement,
            can_split=False,
            hit_rates=self.hit_rates,
        )


class LruPolicy(Policy):
    @cached_property
    def _floor_bytes(self) -> int:
        load = floor_bytes(self._schedules, self._weights, granularity_bytes=self._page_bytes)
        pinned = {access.weight for schedule in self._schedules for access in schedule.accesses if access.pinned}
        # Each weight is an allocation of its own here, so those that must stay share no pages.
        return self._whole_units(load.transient_bytes + sum(self._footprint_bytes(name) for name in pinned))

    @cached_property
    def _unit_bytes(self) -> int:
        return self._driver.pool_unit_bytes

    def _whole_units(self, nbytes: int) -> int:
        return -(-nbytes // self._unit_bytes) * self._unit_bytes

    def _footprint_bytes(self, name: str) -> int:
        # The pool rounds every allocation up: large ones to whole pages, which are an upper bound for small ones.
        return -(-self._weights[name].nbytes // self._page_bytes) * self._page_bytes

    def floor_for(self, calibration: Calibration | None) -> int:
        return self._floor_bytes

    @cached_property
    def full_bytes(self) -> int:
        return self._whole_units(sum(self._footprint_bytes(name) for name in self._weights))

    def arrange(self, budget_bytes: int, calibration: Calibration | None) -> InstalledPlan:
        numbers = lru_numbers(
            self._schedules,
            self._weights,
            # A pool takes whole units, so a cap between two of them would be exceeded.
            budget_bytes=budget_bytes // self._unit_bytes * self._unit_bytes,
            granularity_bytes=self._page_bytes,
        )
        return InstalledPlan(self._program, numbers, None)
