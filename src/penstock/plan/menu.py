"""The menu: every place where a byte of a weight may lie, and the plan that a filled menu comes to.

| row             | device bytes         | link                    | device                         |
|-----------------|----------------------|-------------------------|--------------------------------|
| resident        | all                  | nothing                 | nothing                        |
| packed resident | as packed            | nothing                 | decoded for each stay          |
| streamed        | its share of a ring  | all, for each stay      | nothing                        |
| streamed packed | share of ring, slots | as packed               | decoded for each stay          |
| split           | a prefix             | the rest, by its kernel | both sides are read at once    |
| in place        | none                 | all, by its kernel      | waits for what it reads        |
| experts         | some slots           | those not in a slot     | waits for these                |

A weight can take several rows, one after the other along its bytes. `candidates.py` says which of them, and
`simulator.py` what that costs. This file knows who may take a row, and puts together what was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.plan.calibration import Calibration
from penstock.plan.experts import (
    ExpertBank,
    HitRates,
    allocate_slots,
    bytes_after_prompt,
    bytes_before_held,
    find_banks,
    with_slots,
    without_held,
)
from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES
from penstock.plan.in_place import (
    FreePages,
    HostTimes,
    Prefixes,
    Takes,
    allocate_prefixes,
    host_times,
    in_place_rows,
    stand_ins,
    with_in_place,
    with_prefixes,
)
from penstock.plan.live_ranges import live_ranges
from penstock.plan.packed import Begins, SlotSizes, slot_sizes, with_packed
from penstock.plan.pages import Demand
from penstock.plan.plan import NO_SLOTS, Plan
from penstock.plan.ring import peak_load
from penstock.plan.tuning import LOOKAHEAD_BYTES, LOOKAHEAD_PART, TOKENS_AFTER_PROMPT
from penstock.schedule import Access, Schedule
from penstock.weight import Weight


def _none(_access: Access) -> bool:
    return False


@dataclass(frozen=True)
class Menu:
    """Who may take which row. Every weight may be resident, and streams otherwise, unless it is said here."""

    schedules: tuple[Schedule, ...]
    weights: Mapping[str, Weight]
    page_bytes: int
    # Accesses that read non-resident bytes in host memory: the whole weight, or all but a prefix.
    in_place: Takes = _none
    split: Takes = _none
    # Packed weights. They stream packed, and may stay packed.
    begins: Begins = field(default_factory=dict)
    # Measured hit rates of experts, by a weight of their bank.
    hit_rates: Mapping[str, HitRates] = field(default_factory=dict)

    @cached_property
    def demand(self) -> Demand:
        """The demand of what streams where it is not resident. Other accesses have no bytes in it."""
        return replace(self._demand, runs=self.runs)

    @cached_property
    def _demand(self) -> Demand:
        return Demand.of(*stand_ins(self.schedules, self.weights, self._is_in_place), self.page_bytes)

    @cached_property
    def whole_demand(self) -> Demand:
        """The demand with everything resident."""
        return Demand.of(self.schedules, self.weights, self.page_bytes)

    @property
    def full_pages(self) -> int:
        return self.whole_demand.full_pages

    @property
    def has_other_rows(self) -> bool:
        """Whether other rows can use the pages that streaming leaves."""
        return bool(self.begins) or self.full_pages > self.demand.full_pages

    @cached_property
    def splits(self) -> bool:
        return any(map(self.split, self._accesses))

    @cached_property
    def reads_in_place(self) -> bool:
        """Whether some step may read a weight over the link, and more of it than single rows."""
        return self.splits or any(self.in_place(one) and not one.gathered for one in self._accesses)

    def host_times(self, calibration: Calibration | None) -> HostTimes:
        return host_times(self.schedules, calibration) if self.splits else {}

    @cached_property
    def streamed_experts(self) -> frozenset[str]:
        """Weights whose experts may have slots, and that stream for other methods, which read all of them once for many
        tokens. Not weights that such a method always holds, nor weights that tokens read whole as well."""
        demand = self._demand
        names = {name for bank in self._banks if bank.streams for name in bank.names}
        names &= demand.nbytes.keys() - demand.pinned
        if not names:
            return frozenset()
        for schedule in self.schedules:
            if any(access.routing is not None and access.weight in names for access in schedule.accesses):
                names -= {access.weight for access in schedule.accesses if not self._is_in_place(access)}
        always = [live_ranges(schedule, names).always for schedule in demand.schedules]
        return frozenset(names).difference(*always)

    def pages_for_experts(self, budget_pages: int, floor_pages: int) -> int:
        """Pages of the budget for slots of streamed experts. Everything else comes first, since it is read whole."""
        names, page_bytes = self.streamed_experts, self.page_bytes
        pair_pages = -(-self.demand.peak_pair_bytes(names) // page_bytes)
        ahead_pages = max(1, min(LOOKAHEAD_BYTES // page_bytes, budget_pages // LOOKAHEAD_PART))
        ring_pages = max(pair_pages, self._experts_load + ahead_pages)
        others_pages = max(self.demand.held_pages_without(names) + ring_pages, floor_pages)
        # A bank of one expert has no slots: it is held or not.
        banks = [one for one in without_held(self._banks, self.weights, names) if one.fewest_slots < one.experts]
        return bytes_before_held(banks, (budget_pages - others_pages) * page_bytes) // page_bytes

    @cached_property
    def _experts_load(self) -> int:
        """Ring pages of the step that reads the most of streamed experts."""
        methods = [live_ranges(schedule, self.streamed_experts) for schedule in self.demand.schedules]
        return peak_load(methods, self.demand.pages, leads=False)

    @cached_property
    def runs(self) -> dict[str, int]:
        """How often each method is assumed to run for one run of the others. Methods that take streamed experts by
        index run for the tokens after a prompt."""
        by_index = {
            schedule.method
            for schedule in self.schedules
            for access in schedule.accesses
            if access.routing is not None and access.weight in self.streamed_experts
        }
        return dict.fromkeys(by_index, TOKENS_AFTER_PROMPT)

    def bytes_after_prompt(self, plan: Plan) -> float:
        """Bytes of streamed experts over the link in these runs. The simulator knows nothing of them."""
        names = self.streamed_experts
        return bytes_after_prompt(plan, self.schedules, names, self.hit_rates) if names else 0.0

    def finished(
        self,
        plan: Plan,
        budget_bytes: int,
        times: HostTimes,
        slots: SlotSizes | None = None,
        expert_pages: int = 0,
    ) -> Plan:
        """The plan of what streams or is held, with all other rows placed in what it leaves of the budget."""
        if slots is not None and any(method.copies for method in plan.methods):
            taken_bytes = slots.total_bytes + plan.device_bytes + expert_pages * self.page_bytes
            room_bytes = budget_bytes // self.page_bytes * self.page_bytes - taken_bytes
            plan = with_packed(plan, self.begins, slots, room_bytes)
        if not any(map(self._is_in_place, self._accesses)):
            return plan
        return self._with_in_place(plan, budget_bytes, times)

    def _with_in_place(self, plan: Plan, budget_bytes: int, times: HostTimes) -> Plan:
        """A byte of a prefix saves one byte in every run, a slot at most its own size, a table next to nothing."""
        plan = with_in_place(plan, self.schedules, self.weights, self._is_in_place)
        unheld = set(plan.direct_weights)
        split, tables = ([self.weights[name] for name in names if name in unheld] for names in self._in_place_rows)
        plan = self._with_held(plan, allocate_prefixes(split, [], times, self._free_pages(plan, budget_bytes)))
        unheld = {one.weight for method in plan.methods for one in method.placements if one.bank == NO_SLOTS}
        banks = without_held(self._banks, self.weights, unheld)
        slots = allocate_slots(banks, budget_bytes - plan.device_bytes, self.page_bytes, self.hit_rates)
        plan = with_slots(plan, self.schedules, self.weights, banks, slots)
        plan = self._with_held(plan, Prefixes({}, slots.whole))
        in_slots = {member.weight for bank in plan.banks for member in bank.members}
        tables = [one for one in tables if one.name not in in_slots.union(slots.whole)]
        return self._with_held(plan, allocate_prefixes([], tables, {}, self._free_pages(plan, budget_bytes)))

    def _with_held(self, plan: Plan, prefixes: Prefixes) -> Plan:
        return with_prefixes(plan, self.schedules, self.weights, prefixes, self.split, self._alignment_bytes)

    def _free_pages(self, plan: Plan, budget_bytes: int) -> FreePages:
        return FreePages((budget_bytes - plan.device_bytes) // self.page_bytes, self.page_bytes, self._alignment_bytes)

    @property
    def _alignment_bytes(self) -> int:
        """The same as for all other weights that are held whole."""
        return RESIDENT_ALIGNMENT_BYTES if self.demand.packs else self.page_bytes

    @cached_property
    def _banks(self) -> list[ExpertBank]:
        by_index = [access for access in self._accesses if access.routing is not None]
        elsewhere = {access.weight for access in by_index if not self.in_place(access)}
        streamed = frozenset(access.weight for access in self._accesses if not self._is_in_place(access))
        found = find_banks(self.schedules, self.weights, {access.weight for access in by_index} - elsewhere)
        return [replace(bank, streamed=streamed.intersection(bank.names)) for bank in found]

    def _is_in_place(self, access: Access) -> bool:
        return self.in_place(access) or self.split(access)

    @cached_property
    def _accesses(self) -> list[Access]:
        return [access for schedule in self.schedules for access in schedule.accesses]

    @cached_property
    def _in_place_rows(self) -> tuple[list[str], list[str]]:
        return in_place_rows(self.schedules, self.weights, self.in_place, self.split)

    # ---- packed rows

    @cached_property
    def packed_part(self) -> float:
        """The packed size of packed weights as a part of their decoded size."""
        raw_bytes = sum(self.weights[name].nbytes for name in self.begins)
        return sum(begins[-1] for begins in self.begins.values()) / raw_bytes if raw_bytes else 1.0

    def slots(self, budget_bytes: int, floor_bytes: int) -> list[SlotSizes]:
        """Slots for packed weights beside a plan of at least `floor_bytes`; empty: nothing is packed."""
        return slot_sizes(self.begins, budget_bytes, budget_bytes - floor_bytes, self.page_bytes)

    def most_other_pages(self, longest: Mapping[str, int], spare_pages: int) -> int:
        """The most pages that other rows can use, if `longest` are the suffixes without any of the spare pages."""
        if not self.begins:
            return self.full_pages - self.demand.full_pages
        # All suffixes stay packed. Each page added to a prefix leaves one page less of them, and packed they take less.
        part = self.packed_part
        streamed = sum(size for name, size in longest.items() if name in self.begins)
        if part * streamed >= spare_pages:
            return spare_pages
        packed_pages = part * max(0, streamed - spare_pages) / (1 - part)
        # For the rounding of each weight's last page.
        return min(spare_pages, math.ceil(packed_pages) + len(longest) // 2 + 1)
