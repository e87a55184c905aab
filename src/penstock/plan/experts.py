"""Experts in a plan: which weights make a bank, how many slots each bank gets, and where these lie.

A bank is a set of weights whose rows are taken by one index in every method that takes any: the stacked expert weights
of a layer. Where they are read in host memory, some of their experts may be kept in slots, which the device fills and
replaces by use. Each further slot saves less, so slots go to the bank where the next one saves most of what crosses the
link. Other methods may read all of such a weight, for example a prompt, whose experts have to be dequantized. For those
methods it streams.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

from penstock.plan.plan import NO_SLOTS, Bank, BankMember, Block, MethodPlan, Placement, Plan, Range
from penstock.plan.tuning import (
    DEFAULT_HIT_RATES,
    EXPERTS_OF_A_TOKEN,
    FEWEST_SLOTS_PART,
    SLOTS_BEFORE_HELD_PART,
    TOKENS_AFTER_PROMPT,
)
from penstock.schedule import Access, Schedule
from penstock.weight import Weight, are_experts

# What device allocators give and kernels expect.
_ALIGNMENT_BYTES = 256
# As csrc/experts/expert_table.h has them.
_COUNTS_BYTES, _NUMBERS_BYTES, _LOG_CALLS = 64, 16, 256


def table_bytes(experts: int, slots: int) -> int:
    log_words = -(-experts // 32)
    return _COUNTS_BYTES + _NUMBERS_BYTES + 4 * (5 * experts + slots + _LOG_CALLS * log_words)


@dataclass(frozen=True)
class HitRates:
    """The hit rate of one bank by its number of slots: from no slots on, rising."""

    points: tuple[tuple[float, float], ...]
    # How many experts the bank is asked for, relative to the mean of all banks.
    share: float = 1.0

    @classmethod
    def usual(cls, experts: int) -> HitRates:
        """The rates assumed for a bank of this many experts, where nothing was measured."""
        points = {round(part * experts): rate for part, rate in DEFAULT_HIT_RATES}
        points[0] = 0.0  # where a part of few experts rounds to none
        return cls(tuple(points.items()))

    @cached_property
    def hull(self) -> tuple[tuple[float, float], ...]:
        """The least concave curve above the points: measured ones are not quite concave and would hold slots back."""
        found: list[tuple[float, float]] = []
        for point in self.points:
            while len(found) > 1 and _slope(found[-2], found[-1]) <= _slope(found[-1], point):
                found.pop()
            found.append(point)
        return tuple(found)

    @property
    def last_stretch(self) -> float:
        """The number of slots from which on each further one gains the same, up to a slot for every expert."""
        return self.hull[-2][0]

    def gain(self, slots: int) -> float:
        """What one more slot gains: hits, of as many uses as banks have in the mean."""
        slopes = (_slope(low, high) for low, high in pairwise(self.hull) if low[0] <= slots < high[0])
        return self.share * next(slopes, 0.0)

    def at(self, slots: float) -> float:
        for low, high in pairwise(self.hull):
            if slots < high[0]:
                return low[1] + _slope(low, high) * (slots - low[0])
        return self.hull[-1][1]


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


@dataclass(frozen=True)
class ExpertBank:
    """Weights, in the order of their first access, and how many experts they have."""

    names: tuple[str, ...]
    experts: int
    row_bytes: int
    # Its weights that stream for other methods, which read all of them. Where there is room for all of such a weight,
    # it is held for those methods, and this bank does not hold it once more.
    streamed: frozenset[str] = frozenset()

    @property
    def streams(self) -> bool:
        return bool(self.streamed)

    @property
    def fewest_slots(self) -> int:
        return max(1, -(-self.experts * FEWEST_SLOTS_PART.numerator // FEWEST_SLOTS_PART.denominator))


@dataclass(frozen=True)
class Slots:
    """What will lie on the device: slots, counted by the first weight of a bank, and weights that lie there whole."""

    slots: Mapping[str, int]
    whole: tuple[str, ...] = ()


@dataclass
class _Groups:
    """The accesses of one method that take rows by one index: their weights in order."""

    names: list[str] = field(default_factory=list)
    begin: int = 0
    end: int = 0


def find_banks(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], host_read: Collection[str]
) -> list[ExpertBank]:
    """The banks among the weights in `host_read`. Accesses that take rows of these by an index do so in host memory.

    Weights make a bank if every method that takes rows of one of them takes rows of all, by one index, before it takes
    rows of any by the next. Others are read in host memory without slots.
    """
    sets, refused = _taken_together(schedules, weights)
    banks: list[ExpertBank] = []
    for name, names in sets.items():
        if name == names[0] and not refused.keys() & set(names) and set(names) <= set(host_read):
            experts = weights[name].shape[0]
            banks.append(ExpertBank(names, experts, sum(weights[one].nbytes for one in names) // experts))
    return banks


def taken_together(schedules: Sequence[Schedule], weights: Mapping[str, Weight]) -> dict[str, tuple[str, ...]]:
    """For each weight whose experts are taken: the weights taken by the same index."""
    return _taken_together(schedules, weights)[0]


def why_no_slots(schedules: Sequence[Schedule], weights: Mapping[str, Weight]) -> dict[str, str]:
    """Weights whose experts some method takes but that make no bank: by name, the reason."""
    sets, refused = _taken_together(schedules, weights)
    return {name: refused[name] for name in sets if name in refused}


def _taken_together(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """By weight, the weights taken by the same index; and the reason for each that makes no bank."""
    sets: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}

    def refuse(names: Collection[str], reason: str) -> None:
        for name in names:
            refused.setdefault(name, reason)

    for schedule in schedules:
        method = f"method {schedule.method!r}"
        groups: dict[int, _Groups] = {}
        for position, access in enumerate(schedule.accesses):
            if access.routing is None:
                continue
            group = groups.setdefault(access.routing, _Groups(begin=position))
            group.names.append(access.weight)
            group.end = position
        last_of: dict[str, int] = {}
        for group in sorted(groups.values(), key=lambda group: group.begin):
            names = tuple(dict.fromkeys(group.names))
            for name in names:
                known = sets.setdefault(name, names)
                together = {*known, *names}
                if len(names) != len(group.names):
                    twice = next(one for one in names if group.names.count(one) > 1)
                    refuse(together, f"{method} takes {twice!r} twice by one index")
                if set(known) != set(names):
                    other = min(set(known) ^ set(names))
                    refuse(together, f"{other!r} is taken by its index in one place, and in another it is not")
                if last_of.get(name, -1) > group.begin:
                    refuse(together, f"{method} takes {name!r} by one index before it has taken all by another")
                last_of[name] = group.end
    for names in sets.values():
        other = names[0]
        for one in names:
            if not are_experts(weights[one]) or weights[one].shape[0] != weights[other].shape[0]:
                shapes = f"{list(weights[one].shape)} and {list(weights[other].shape)}"
                refuse(names, f"{one!r} and {other!r} are taken by the same index, and have shapes {shapes}")
    return sets, refused


def allocate_slots(
    banks: Sequence[ExpertBank], spare_bytes: int, page_bytes: int, hit_rates: Mapping[str, HitRates]
) -> Slots:
    """Gives slots one by one to the bank where the next one saves most of what crosses the link. A bank with a slot for
    every expert lies there whole, unless it streams for other methods.

    Of equals, the bank with the fewest slots comes first. On the last stretch of the curve it is the one with the most:
    each slot saves the same there, and a bank that lies there whole needs no lookups, which take 20 us a layer.
    """
    by_name = {bank.names[0]: bank for bank in banks}
    rates = {name: _rates_of(bank, hit_rates) for name, bank in by_name.items()}
    given = dict.fromkeys(by_name, 0)
    # Slots are in one block, and whole weights in another: each is rounded up to pages by itself.
    slots_bytes = whole_bytes = 0

    def offer(name: str) -> tuple[float, int, str]:
        # Per byte: an expert in a slot saves as many bytes as the slot takes.
        slots = given[name]
        completes = not by_name[name].streams and slots >= rates[name].last_stretch
        return -rates[name].gain(slots), -slots if completes else slots, name

    waiting = [offer(name) for name in by_name]
    heapify(waiting)
    while waiting:
        _, _, name = heappop(waiting)
        bank, before = by_name[name], given[name]
        after = max(before + 1, bank.fewest_slots)
        if bank.streams and after == bank.experts:
            continue
        slots_after, whole_after = slots_bytes - _slots_bytes(bank, before), whole_bytes
        if after < bank.experts:
            slots_after += _slots_bytes(bank, after)
        else:
            whole_after += _whole_bytes(bank, page_bytes)
        if -(-slots_after // page_bytes) + -(-whole_after // page_bytes) > spare_bytes // page_bytes:
            continue
        slots_bytes, whole_bytes = slots_after, whole_after
        given[name] = after
        if after < bank.experts:
            heappush(waiting, offer(name))
    whole = tuple(one for name, slots in given.items() if slots == by_name[name].experts for one in by_name[name].names)
    return Slots({name: slots for name, slots in given.items() if 0 < slots < by_name[name].experts}, whole)


def _rates_of(bank: ExpertBank, hit_rates: Mapping[str, HitRates]) -> HitRates:
    """Rates may be listed under any weight of the bank: measured for all of them, or while others were held."""
    return next((hit_rates[name] for name in bank.names if name in hit_rates), None) or HitRates.usual(bank.experts)


def without_held(
    banks: Sequence[ExpertBank], weights: Mapping[str, Weight], host_read: Collection[str]
) -> list[ExpertBank]:
    """What is left of the banks if only the weights in `host_read` are read in host memory, and all others are held."""
    found: list[ExpertBank] = []
    for bank in banks:
        names = tuple(name for name in bank.names if name in host_read)
        if names:
            row_bytes = sum(weights[name].nbytes for name in names) // bank.experts
            found.append(replace(bank, names=names, row_bytes=row_bytes, streamed=bank.streamed.intersection(names)))
    return found


def bytes_after_prompt(
    plan: Plan,
    schedules: Sequence[Schedule],
    names: Collection[str],
    hit_rates: Mapping[str, HitRates],
) -> float:
    """The bytes that tokens are assumed to read over the link, after a prompt that reads these experts whole."""
    missed = [0.0] * len(plan.banks)
    for number, bank in enumerate(plan.banks):
        members = tuple(member.weight for member in bank.members)
        missed[number] = 1.0 - _rates_of(ExpertBank(members, bank.experts, bank.row_bytes), hit_rates).at(bank.slots)
    read_bytes = 0.0
    for schedule, method in zip(schedules, plan.methods, strict=True):
        for access, placed in zip(schedule.accesses, method.placements, strict=True):
            if access.routing is not None and placed.bank is not None and access.weight in names:
                read_bytes += placed.nbytes * (1.0 if placed.bank == NO_SLOTS else missed[placed.bank])
    return read_bytes * EXPERTS_OF_A_TOKEN * TOKENS_AFTER_PROMPT


def guessed_bytes_after_prompt(streamed_bytes: int, slots_bytes: int) -> float:
    """The same, guessed from the bytes of experts and of slots before there is a plan."""
    part = min(slots_bytes / streamed_bytes, 1.0) if streamed_bytes else 1.0
    missed = 1.0 - HitRates(DEFAULT_HIT_RATES).at(part)
    return streamed_bytes * missed * EXPERTS_OF_A_TOKEN * TOKENS_AFTER_PROMPT


def bytes_before_held(banks: Sequence[ExpertBank], spare_bytes: int) -> int:
    """How much of the memory in which experts that stream for other methods could be held goes to their slots.

    Slots come first, up to a part of the experts. Beyond that the planner holds some experts for those methods, and
    these need no slots any more. So slots get less and less, and nothing where all are held.
    """
    all_bytes = sum(bank.experts * bank.row_bytes for bank in banks if bank.streams)
    part = SLOTS_BEFORE_HELD_PART
    return max(0, min(spare_bytes, int(part * all_bytes), int(part / (1 - part) * (all_bytes - spare_bytes))))


def _slots_bytes(bank: ExpertBank, slots: int) -> int:
    """Table included. The slots of each weight begin at an aligned offset."""
    if not slots:
        return 0
    return _aligned(table_bytes(bank.experts, slots)) + slots * bank.row_bytes + len(bank.names) * _ALIGNMENT_BYTES


def _whole_bytes(bank: ExpertBank, page_bytes: int) -> int:
    # Pages that are no multiple of the alignment are not shared.
    alignment_bytes = page_bytes if page_bytes % _ALIGNMENT_BYTES else _ALIGNMENT_BYTES
    return bank.experts * bank.row_bytes + len(bank.names) * alignment_bytes


def with_slots(
    plan: Plan, schedules: Sequence[Schedule], weights: Mapping[str, Weight], banks: Sequence[ExpertBank], slots: Slots
) -> Plan:
    """The plan with these slots and tables in a block of their own. Nothing else of it changes."""
    chosen = [bank for bank in banks if bank.names[0] in slots.slots]
    if not chosen:
        return plan
    range_index = len(plan.ranges)
    end_bytes = 0

    def room(nbytes: int) -> int:
        nonlocal end_bytes
        begin_bytes = _aligned(end_bytes)
        end_bytes = begin_bytes + nbytes
        return begin_bytes

    made: list[Bank] = []
    for bank in chosen:
        count = slots.slots[bank.names[0]]
        table_at = room(table_bytes(bank.experts, count))
        row_bytes = {name: weights[name].nbytes // bank.experts for name in bank.names}
        members = tuple(
            BankMember(name, row_bytes[name], range_index, room(count * row_bytes[name])) for name in bank.names
        )
        made.append(Bank(bank.experts, count, range_index, table_at, members))
    nbytes = -(-end_bytes // plan.page_bytes) * plan.page_bytes
    bank_of = {member.weight: index for index, bank in enumerate(made) for member in bank.members}

    def method(schedule: Schedule, found: MethodPlan) -> MethodPlan:
        seen: set[int] = set()

        def placed(access: Access, placement: Placement) -> Placement:
            bank = bank_of.get(access.weight)
            if bank is None or access.routing is None:
                return placement
            chooses = access.routing not in seen
            seen.add(access.routing)
            return replace(placement, bank=bank, chooses=chooses)

        return replace(found, placements=tuple(map(placed, schedule.accesses, found.placements)))

    return replace(
        plan,
        blocks=(*plan.blocks, Block(nbytes, ring=False)),
        ranges=(*plan.ranges, Range(nbytes, (len(plan.blocks),))),
        banks=tuple(made),
        methods=tuple(map(method, schedules, plan.methods)),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
