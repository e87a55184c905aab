"""The planner of a weights file with packed weights: it divides the budget between weights as they are decoded, weights
that stay packed, and the ring that these and all others pass through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from penstock.errors import BelowFloorError
from penstock.plan.calibration import Calibration
from penstock.plan.demand import Demand, small_copy_bytes
from penstock.plan.direct import read_directly_by_default
from penstock.plan.nominal import nominal
from penstock.plan.packed import Begins, SlotSizes, streams_packed, with_packed
from penstock.plan.placements import DirectChoice
from penstock.plan.plan import Plan
from penstock.plan.planner import FloorPlan
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import (
    MEASURED_UNPACKED_PARTS,
    MOST_SLOTS_BYTES,
    SLOTS,
    SLOTS_PART_OF_BUDGET,
    STORED_WHOLE_ATTEMPTS,
    STORED_WHOLE_STEP,
    UNPACKED_PARTS,
)
from penstock.schedule import Access, Schedule
from penstock.weight import Weight

# Of a slot, as of resident weights.
_ALIGNMENT_BYTES = 256


class PackedPlanner:
    """The plans of one program at different budgets, with the interface of Planner."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        weights: Mapping[str, Weight],
        begins: Begins,
        *,
        page_bytes: int,
        reads_in_place: bool,
    ) -> None:
        """`reads_in_place`: whether tables that are not packed, and only gathered from, may stay in host memory."""
        self._schedules = tuple(schedules)
        self._begins = begins
        self._page_bytes = page_bytes
        self._demand = Demand.of(schedules, weights, page_bytes)

        def may_be_direct(access: Access) -> bool:
            is_worth_it = weights[access.weight].nbytes >= max(small_copy_bytes(page_bytes), 1)
            may = reads_in_place and access.weight not in begins
            return may and is_worth_it and read_directly_by_default(access)

        self._unpacked = DirectChoice(schedules, weights, page_bytes, may_be_direct)

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that `plan` accepts: of weights that are not packed, and the smallest slots."""
        return min(self._unpacked.floor_bytes + self._least_slots_bytes, self.full_bytes)

    def floor_for(self, _calibration: Calibration | None) -> int:
        return self.floor_bytes

    @property
    def copying_bytes(self) -> int:
        return self.floor_bytes

    @property
    def full_bytes(self) -> int:
        """Everything is decoded once, when it is loaded. A larger budget buys nothing."""
        return self._unpacked.full_bytes

    def floor(self) -> FloorPlan:
        return replace(self._unpacked.floor(), floor_bytes=self.floor_bytes, plan=self.plan(self.floor_bytes))

    def plan(self, budget_bytes: int, calibration: Calibration | None = None) -> Plan:
        """The plan that takes the least time within the budget, by measured times or on nominal machines."""
        if budget_bytes >= self.full_bytes:
            return self._unpacked.plan(budget_bytes, calibration)
        if budget_bytes < self.floor_bytes:
            raise BelowFloorError(
                f"the budget is {budget_bytes} bytes, but the floor is {self.floor_bytes} bytes: "
                f"{self._unpacked.floor_bytes} bytes for weights as they are decoded, and {self._least_slots_bytes} "
                "bytes for packed ones on their way",
                budget_bytes=budget_bytes,
                floor_bytes=self.floor_bytes,
            )
        slots = self._slots(budget_bytes)
        room_bytes = (budget_bytes - slots.total_bytes) // self._page_bytes * self._page_bytes

        def divided(unpacked_bytes: int, calibration: Calibration | None) -> Plan:
            plan = self._unpacked_plan(unpacked_bytes, calibration)
            if not any(method.copies for method in plan.methods):
                return plan
            return with_packed(plan, self._begins, slots, room_bytes - plan.device_bytes)

        known = [calibration] if calibration is not None else nominal(self._demand)
        parts = UNPACKED_PARTS if calibration is None else MEASURED_UNPACKED_PARTS
        floor_bytes = self._unpacked.floor_bytes
        sizes = [self._pages_of(floor_bytes + int((room_bytes - floor_bytes) * part)) for part in parts]
        # Divided without the times of steps, which takes a fifth as long; judged by them.
        drafts = {nbytes: divided(nbytes, None) for nbytes in sizes}
        if not streams_packed(drafts[sizes[0]]):
            nbytes = self._with_all_stored(drafts[sizes[0]], room_bytes, lambda nbytes: divided(nbytes, None))
            drafts[nbytes] = divided(nbytes, None)
        by_time = {nbytes: sum(self.predicted_s(plan, one) for one in known) for nbytes, plan in drafts.items()}
        best = min(drafts, key=by_time.__getitem__)
        if calibration is None:
            return drafts[best]
        timed = divided(best, calibration)
        return timed if self.predicted_s(timed, calibration) < by_time[best] else drafts[best]

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        return predicted_s(plan, self._schedules, calibration)

    def _unpacked_plan(self, nbytes: int, calibration: Calibration | None) -> Plan:
        """At the floor it is the same for every budget, and kept."""
        if calibration is not None or nbytes != self._unpacked.floor_bytes:
            return self._unpacked.plan(nbytes, calibration)
        return self._lowest_unpacked

    @cached_property
    def _lowest_unpacked(self) -> Plan:
        return self._unpacked.plan(self._unpacked.floor_bytes, None)

    def _with_all_stored(self, lowest: Plan, room_bytes: int, divided: Callable[[int], Plan]) -> int:
        """What decoded weights can take while everything else still stays packed, and nothing goes over the link."""
        held = sum(store.packed_bytes for store in lowest.stores)
        unpacked = sum(store.piece.nbytes for store in lowest.stores)
        floor_bytes = self._unpacked.floor_bytes
        spare_bytes = room_bytes - floor_bytes - held
        # Each byte more of a decoded weight is one byte less of a packed one, which takes less.
        more_bytes = spare_bytes / (1 - held / unpacked) if held < unpacked else 0.0
        for attempt in range(STORED_WHOLE_ATTEMPTS):
            nbytes = self._pages_of(floor_bytes + int(more_bytes * (1 - attempt * STORED_WHOLE_STEP)))
            if floor_bytes <= nbytes <= room_bytes and not streams_packed(divided(nbytes)):
                return nbytes
        return floor_bytes

    # ---- slots

    @cached_property
    def _largest_block_bytes(self) -> int:
        return max(after - begin for begins in self._begins.values() for begin, after in pairwise(begins))

    @cached_property
    def _least_slots_bytes(self) -> int:
        """Two: one is filled while the other is decoded."""
        return self._whole_pages(2 * self._aligned(self._largest_block_bytes))

    def _slots(self, budget_bytes: int) -> SlotSizes:
        wanted = min(MOST_SLOTS_BYTES, int(budget_bytes * SLOTS_PART_OF_BUDGET))
        wanted = min(wanted, budget_bytes - self._unpacked.floor_bytes)
        total_bytes = max(wanted // self._page_bytes * self._page_bytes, self._least_slots_bytes)
        count = SLOTS
        while count > 2 and total_bytes // count // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES < self._largest_block_bytes:
            count -= 1
        return SlotSizes(count, total_bytes // count // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, total_bytes)

    def _pages_of(self, nbytes: int) -> int:
        return nbytes // self._page_bytes * self._page_bytes

    def _whole_pages(self, nbytes: int) -> int:
        return -(-nbytes // self._page_bytes) * self._page_bytes

    @staticmethod
    def _aligned(nbytes: int) -> int:
        return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
