"""The menu: every place where a byte of a weight may lie, and the plan that a filled menu comes to.

| row             | device bytes         | link                    | device                         |
|-----------------|----------------------|-------------------------|--------------------------------|
| resident        | all                  | nothing                 | nothing                        |
| packed resident | as packed            | nothing                 | decoded for each stay          |
| streamed        | its share of a ring  | all, for each stay      | nothing                        |
| streamed packed | and of the slots     | as packed               | decoded for each stay          |
| split           | a prefix             | the rest, by its kernel | both sides are read at once    |
| in place        | none                 | all, by its kernel      | waits for what it reads        |
| experts         | some slots           | those not in a slot     | waits for these                |

A weight takes several rows, one after the other along its bytes. Which of them, `fill.py` says, and `simulator.py` what
that costs: this file knows who may take a row, and puts together what was chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from penstock.plan.calibration import Calibration
from penstock.plan.demand import Demand
from penstock.plan.direct import IsDirect, stand_ins, with_direct
from penstock.plan.experts import ExpertBank, HitRates, allocate_slots, find_banks, with_slots
from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES
from penstock.plan.packed import Begins, SlotSizes, with_packed
from penstock.plan.plan import Plan
from penstock.plan.prefixes import Prefixes, Spare, allocate_prefixes, host_curves
from penstock.plan.ratios import TimeCurve
from penstock.plan.split import with_prefixes
from penstock.plan.tuning import MOST_SLOTS_BYTES, SLOT_COUNTS, SLOTS_PART_OF_BUDGET
from penstock.schedule import Access, Schedule
from penstock.weight import Weight


def _none(_access: Access) -> bool:
    return False


@dataclass(frozen=True)
class Menu:
    """Who may take which row. Everything may be resident, and streams otherwise, unless it is said here."""

    schedules: tuple[Schedule, ...]
    weights: Mapping[str, Weight]
    page_bytes: int
    # Accesses that read in host memory what is not resident: as a whole, or but for a prefix.
    in_place: IsDirect = _none
    split: IsDirect = _none
    # Packed weights, which stream packed, and may stay so.
    begins: Begins = field(default_factory=dict)
    # What was measured of experts, by the first weight of their bank.
    hit_rates: Mapping[str, HitRates] = field(default_factory=dict)

    @cached_property
    def demand(self) -> Demand:
        """Of what streams where it is not resident. Other accesses read nothing of it."""
        return Demand.of(*stand_ins(self.schedules, self.weights, self._is_in_place), self.page_bytes)

    @cached_property
    def full_pages(self) -> int:
        """With everything resident."""
        return self._whole_demand.full_pages

    @cached_property
    def other_pages(self) -> int:
        """What weights that are read in host memory could take at the most."""
        return self.full_pages - self.demand.full_pages

    def curves(self, calibration: Calibration | None) -> dict[str, TimeCurve]:
        return host_curves(self.schedules, calibration) if self._split_weights else {}

    def finished(
        self, plan: Plan, budget_bytes: int, curves: Mapping[str, TimeCurve], slots: SlotSizes | None = None
    ) -> Plan:
        """The plan of what streams or is held, and all other rows in what it leaves of the budget."""
        plan = with_direct(plan, self.schedules, self.weights, self._is_in_place)
        if slots is not None and any(method.copies for method in plan.methods):
            room_bytes = budget_bytes // self.page_bytes * self.page_bytes - slots.total_bytes - plan.device_bytes
            plan = with_packed(plan, self.begins, slots, room_bytes)
        return self._with_prefixes(plan, budget_bytes, curves)

    def _with_prefixes(self, plan: Plan, budget_bytes: int, curves: Mapping[str, TimeCurve]) -> Plan:
        unheld = frozenset(plan.direct_weights)
        if not unheld:
            return plan
        # A byte of a prefix saves one in every run, a slot at most so many as it takes, and a table next to nothing.
        split = [self.weights[name] for name in self._split_weights if name in unheld]
        plan = self._with_held(plan, budget_bytes, lambda spare: allocate_prefixes(split, [], curves, spare))
        plan, experts = self._with_slots(plan, budget_bytes)
        tables = [self.weights[name] for name in self._tables if name in unheld and name not in experts]
        return self._with_held(plan, budget_bytes, lambda spare: allocate_prefixes([], tables, {}, spare))

    def _with_held(self, plan: Plan, budget_bytes: int, allocate: Callable[[Spare], Prefixes]) -> Plan:
        spare = Spare((budget_bytes - plan.device_bytes) // self.page_bytes, self.page_bytes, self._alignment_bytes)
        prefixes = allocate(spare)
        return with_prefixes(plan, self.schedules, self.weights, prefixes, self.split, self._alignment_bytes)

    def _with_slots(self, plan: Plan, budget_bytes: int) -> tuple[Plan, frozenset[str]]:
        """And the experts that have slots, or lie on the device whole."""
        slots = allocate_slots(self._banks, budget_bytes - plan.device_bytes, self.page_bytes, self.hit_rates)
        plan = with_slots(plan, self.schedules, self.weights, self._banks, slots)
        whole = Prefixes({}, slots.whole)
        plan = with_prefixes(plan, self.schedules, self.weights, whole, self.split, self._alignment_bytes)
        return plan, frozenset(slots.whole) | {member.weight for bank in plan.banks for member in bank.members}

    @cached_property
    def _banks(self) -> list[ExpertBank]:
        others = {access.weight for access in self.accesses if not self.in_place(access) or self.split(access)}
        return find_banks(self.schedules, self.weights, {access.weight for access in self.accesses} - others)

    def _is_in_place(self, access: Access) -> bool:
        return self.in_place(access) or self.split(access)

    @cached_property
    def _whole_demand(self) -> Demand:
        return Demand.of(self.schedules, self.weights, self.page_bytes)

    @cached_property
    def accesses(self) -> Sequence[Access]:
        return [access for schedule in self.schedules for access in schedule.accesses]

    @cached_property
    def _split_weights(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(access.weight for access in self.accesses if self.split(access)))

    @cached_property
    def _tables(self) -> list[str]:
        """Weights that are only read in place, those first that gain the most by being held.

        A kernel that reads all of a weight gains more than one that gathers; and twice read is twice gained.
        """
        others = {access.weight for access in self.accesses if not self.in_place(access) or self.split(access)}
        read_whole = {access.weight for access in self.accesses if not access.gathered}
        times = Counter(access.weight for access in self.accesses if access.weight not in others)
        return sorted(times, key=lambda name: (name not in read_whole, -times[name], -self.weights[name].nbytes))

    @property
    def _alignment_bytes(self) -> int:
        """As weights held whole lie anywhere else."""
        return RESIDENT_ALIGNMENT_BYTES if self._whole_demand.packs else self.page_bytes

    # ---- what packed weights pass through

    @cached_property
    def packed_part(self) -> float:
        """Of packed weights: what they take beside what they are decoded to."""
        raw_bytes = sum(self.weights[name].nbytes for name in self.begins)
        return sum(begins[-1] for begins in self.begins.values()) / raw_bytes if raw_bytes else 1.0

    @cached_property
    def least_slots_bytes(self) -> int:
        """Two: one is filled while the other is decoded."""
        if not self.begins:
            return 0
        return -(-2 * _aligned(self._largest_block_bytes) // self.page_bytes) * self.page_bytes

    def slots(self, budget_bytes: int, floor_bytes: int) -> SlotSizes | None:
        """Beside a plan of at least so many bytes. None: nothing is packed."""
        if not self.begins:
            return None
        wanted = min(MOST_SLOTS_BYTES, int(budget_bytes * SLOTS_PART_OF_BUDGET), budget_bytes - floor_bytes)
        total_bytes = max(wanted // self.page_bytes * self.page_bytes, self.least_slots_bytes)
        return self.slot_sizes(total_bytes)[0]

    def slot_sizes(self, total_bytes: int) -> list[SlotSizes]:
        """What so many bytes can be divided into, more and smaller slots first: every block fits into one."""
        sizes = [SlotSizes(count, _slot_bytes(total_bytes, count), total_bytes) for count in SLOT_COUNTS]
        return [one for one in sizes if one.count == 2 or one.nbytes >= self._largest_block_bytes]

    @cached_property
    def _largest_block_bytes(self) -> int:
        return max(after - begin for begins in self.begins.values() for begin, after in pairwise(begins))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // RESIDENT_ALIGNMENT_BYTES) * RESIDENT_ALIGNMENT_BYTES


def _slot_bytes(total_bytes: int, count: int) -> int:
    return total_bytes // count // RESIDENT_ALIGNMENT_BYTES * RESIDENT_ALIGNMENT_BYTES
