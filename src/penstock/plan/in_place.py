"""Weights that kernels read in place, in host memory: whole, or all but a prefix that lies on the device.

Such an access takes no pages that others wait for, and waits for no copy. So the planner sees a stand-in without bytes
for its weight, and its placement is corrected in the finished plan. What nobody else needs of the budget goes to
prefixes, where it saves the most, and then to whole tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from penstock.plan.assembly import Memory
from penstock.plan.calibration import Calibration
from penstock.plan.floor import round_up
from penstock.plan.plan import DIRECT, NO_SLOTS, SPLIT_ROWS, MethodPlan, Piece, Placement, Plan
from penstock.plan.tuning import PREFIX_GRAIN_ROWS
from penstock.schedule import Access, Schedule
from penstock.weight import Weight

# Whether an access takes a row of the menu.
Takes = Callable[[Access], bool]

# By split weight, for every method that multiplies by it: the time of its steps with the weight on the device, and in
# place. Empty if that was not timed.
HostTimes = Mapping[str, Sequence[tuple[float, float]]]


def read_directly_by_default(access: Access) -> bool:
    return access.gathered and not access.pinned


# Savings that agree to this many digits are equal but for rounding.
_SAVING_DIGITS = 9

# No weight's name contains it: names of parameters and buffers are printable.
_MARK = "\0direct"


def stand_ins(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], is_direct: Takes
) -> tuple[list[Schedule], dict[str, Weight]]:
    """The same schedules, and the weights they name, with stand-ins for what is read directly."""
    used = dict(weights)

    def replaced(access: Access) -> Access:
        if not is_direct(access):
            return access
        name = access.weight + _MARK
        used.setdefault(name, Weight(name, weights[access.weight].dtype, (0,), (0,)))
        return replace(access, weight=name)

    return [replace(one, accesses=tuple(map(replaced, one.accesses))) for one in schedules], used


@dataclass(frozen=True)
class Prefixes:
    """The parts on the device of weights that would otherwise be read in host memory."""

    # By weight, and never all of it.
    prefix_bytes: Mapping[str, int]
    # Weights that lie there whole, one after the other.
    whole: tuple[str, ...]


def in_place_rows(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], in_place: Takes, split: Takes
) -> tuple[list[str], list[str]]:
    """Weights that may be split; and weights that are only read in place, those that gain the most by being held first.

    A kernel that reads all of a weight gains more than one that gathers, and a weight read twice gains twice.
    """
    accesses = [access for schedule in schedules for access in schedule.accesses]
    others = {access.weight for access in accesses if not in_place(access) or split(access)}
    read_whole = {access.weight for access in accesses if not access.gathered}
    times = Counter(access.weight for access in accesses if access.weight not in others)
    tables = sorted(times, key=lambda name: (name not in read_whole, -times[name], -weights[name].nbytes))
    return list(dict.fromkeys(access.weight for access in accesses if split(access))), tables


def with_in_place(plan: Plan, schedules: Sequence[Schedule], weights: Mapping[str, Weight], is_direct: Takes) -> Plan:
    """Turns the plan of the stand-ins into one of the schedules: what is read in host memory has no other place yet.

    Where a weight is wholly resident all the same, for other accesses, the direct ones read it there.
    """
    whole = {
        one.weight: one
        for method in plan.methods
        for one in method.placements
        if one.stay is None and one.nbytes and not one.in_place_bytes
    }

    def placed(access: Access, found: Placement) -> Placement:
        if not is_direct(access):
            return found
        if access.weight in whole:
            return replace(whole[access.weight], number=access.number)
        bank = None if access.routing is None else NO_SLOTS
        return Placement(access.number, access.weight, weights[access.weight].nbytes, DIRECT, 0, None, bank=bank)

    return _with_placements(plan, schedules, placed)


def with_prefixes(
    plan: Plan,
    schedules: Sequence[Schedule],
    weights: Mapping[str, Weight],
    prefixes: Prefixes,
    split: Takes,
    alignment_bytes: int,
) -> Plan:
    """The plan with these on the device. Prefixes serve accesses that `split` takes, whole weights all direct ones."""
    memory = Memory(plan.page_bytes, plan)
    nbytes = {name: weight.nbytes for name, weight in weights.items()}
    whole_at = memory.hold(prefixes.whole, nbytes, alignment_bytes)
    prefix_at: dict[str, int] = {}
    for name, prefix_bytes in prefixes.prefix_bytes.items():
        memory.fills.append(Piece(name, 0, prefix_bytes, len(memory.ranges), 0))
        prefix_at[name] = memory.add_range(prefix_bytes)

    def placed(access: Access, found: Placement) -> Placement:
        name = access.weight
        if found.is_direct and name in whole_at:
            return Placement(access.number, name, nbytes[name], *whole_at[name], None)
        if found.is_direct and name in prefix_at and split(access):
            return replace(found, range_index=prefix_at[name], prefix_bytes=prefixes.prefix_bytes[name])
        return found

    held = replace(plan, blocks=tuple(memory.blocks), ranges=tuple(memory.ranges), fills=tuple(memory.fills))
    return _with_placements(held, schedules, placed)


def _with_placements(
    plan: Plan, schedules: Sequence[Schedule], placed: Callable[[Access, Placement], Placement]
) -> Plan:
    def method(schedule: Schedule, found: MethodPlan) -> MethodPlan:
        return replace(found, placements=tuple(map(placed, schedule.accesses, found.placements)))

    return replace(plan, methods=tuple(map(method, schedules, plan.methods)))


# ---- how long a prefix each split weight gets


def host_times(schedules: Sequence[Schedule], calibration: Calibration | None) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for schedule in schedules:
        resident_s = None if calibration is None else calibration.step_s.get(schedule.method)
        direct_s = None if calibration is None else calibration.direct_step_s.get(schedule.method)
        if resident_s is None or direct_s is None:
            return {}
        steps: dict[str, list[int]] = {}
        for access in schedule.accesses:
            if access.linear:
                steps.setdefault(access.weight, []).append(schedule.first_step[access.number])
        for name, of_weight in steps.items():
            times = sum(resident_s[step] for step in of_weight), sum(direct_s[step] for step in of_weight)
            found.setdefault(name, []).append(times)
    return found


@dataclass(frozen=True)
class SplittableWeight:
    """A weight that may be split: rows, one after the other, and its times on the device and in place by method.

    With a part of it in place, steps take that part of the time in place, but never less than with none in place:
    device memory and link are read side by side. Up to there the link is free; beyond it every byte costs the same.
    """

    name: str
    nbytes: int
    rows: int
    page_bytes: int
    times: Sequence[tuple[float, float]]

    @property
    def may_have_prefix(self) -> bool:
        """A prefix takes pages of its own, so a weight that fits in one is held whole or not at all."""
        return self.nbytes > self.page_bytes and self.rows > SPLIT_ROWS

    def prefix_in(self, pages: int) -> int:
        """Bytes of the longest prefix that fits in this many pages."""
        row_bytes = self.nbytes // self.rows
        rows = min(pages * self.page_bytes // row_bytes, self.rows - 1)
        return rows // _grain(rows) * _grain(rows) * row_bytes

    def longer(self, prefix_bytes: int) -> int:
        """The next longer prefix by whole pages; all of the weight where there is none."""
        row_bytes = self.nbytes // self.rows
        rows = prefix_bytes // row_bytes
        rows += _grain(rows)
        pages = max(self.pages(prefix_bytes) + 1, self.pages(rows * row_bytes))
        return self.nbytes if rows >= self.rows or pages * self.page_bytes >= self.nbytes else self.prefix_in(pages)

    def pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)

    def added_s(self, prefix_bytes: float) -> float:
        """By how much a run is longer because of what is not in the prefix."""
        part = 1 - prefix_bytes / self.nbytes
        return sum(max(direct_s * part - resident_s, 0.0) for resident_s, direct_s in self.times)

    @cached_property
    def stretches(self) -> list[tuple[float, float]]:
        """Stretches along its bytes: how many bytes, and the seconds that each of them saves, less and less."""
        ends = {1 - min(resident_s / direct_s, 1.0) for resident_s, direct_s in self.times if direct_s}
        found: list[tuple[float, float]] = []
        begin = 0.0
        for end in sorted(ends | {1.0}):
            nbytes = (end - begin) * self.nbytes
            if nbytes > 0:
                slope = (self.added_s(begin * self.nbytes) - self.added_s(end * self.nbytes)) / nbytes
                found.append((nbytes, slope))
                begin = end
        return found

    def saving(self, prefix_bytes: int) -> float:
        """Seconds saved per byte when the prefix is made longer; as a logarithm, so that all rounding is alike."""
        after = self.longer(prefix_bytes)
        saved_s = self.added_s(prefix_bytes) - self.added_s(after)
        return round(math.log(saved_s / (after - prefix_bytes)), _SAVING_DIGITS) if saved_s > 0 else -math.inf


def _grain(rows: int) -> int:
    return PREFIX_GRAIN_ROWS if rows >= PREFIX_GRAIN_ROWS else SPLIT_ROWS


def best_parts(weights: Sequence[SplittableWeight], room_bytes: float) -> list[float]:
    """Bytes of the prefixes that save the most. Takes stretches in the order of what each byte saves, and of equals the
    same part of each. That is exact, since the stretches of a weight save less and less."""
    found = [0.0] * len(weights)
    by_slope: dict[float, list[tuple[int, float]]] = {}
    for index, weight in enumerate(weights):
        for nbytes, slope in weight.stretches:
            by_slope.setdefault(slope, []).append((index, nbytes))
    for slope in sorted(by_slope, reverse=True):
        wanted = sum(nbytes for _, nbytes in by_slope[slope])
        part = min(room_bytes / wanted, 1.0)
        for index, nbytes in by_slope[slope]:
            found[index] += part * nbytes
        room_bytes -= part * wanted
    return found


def allocate_prefixes(
    weights: Sequence[Weight], tables: Sequence[Weight], times: HostTimes, room: FreePages
) -> Prefixes:
    """Prefixes by the time they save, or equal parts of all where times are not known, in whole rows and pages.

    Tables are held whole or not at all, in their order, in what the prefixes leave.
    """
    splittable = [
        SplittableWeight(one.name, one.nbytes, one.shape[0], room.page_bytes, times.get(one.name, [(0.0, one.nbytes)]))
        for one in sorted(weights, key=lambda one: one.nbytes)
    ]
    for weight in splittable:
        if not weight.may_have_prefix:
            room.hold(weight.name, weight.nbytes)
    large = [weight for weight in reversed(splittable) if weight.may_have_prefix]
    prefix_bytes: dict[str, int] = {}
    for weight, wanted in zip(large, best_parts(large, room.left_pages * room.page_bytes), strict=True):
        if wanted < weight.nbytes - 0.5 or not room.hold(weight.name, weight.nbytes):
            prefix_bytes[weight.name] = weight.prefix_in(min(int(wanted + 0.5) // room.page_bytes, room.left_pages))
            room.take(weight.pages(prefix_bytes[weight.name]))
    _use_up(large, prefix_bytes, room)
    for table in tables:
        room.hold(table.name, table.nbytes)
    return Prefixes({name: nbytes for name, nbytes in prefix_bytes.items() if nbytes}, tuple(room.held))


def _use_up(weights: Sequence[SplittableWeight], prefix_bytes: dict[str, int], room: FreePages) -> None:
    """What rounding leaves goes where it saves the most; of equals to each in turn, the largest first."""

    def entry(weight: SplittableWeight, turn: int) -> tuple[float, int, int, str]:
        return -weight.saving(prefix_bytes[weight.name]), turn, -weight.nbytes, weight.name

    by_name = {weight.name: weight for weight in weights}
    waiting = [entry(by_name[name], 0) for name in prefix_bytes]
    heapify(waiting)
    while waiting and room.left_pages:
        _, turn, _, name = heappop(waiting)
        weight, before = by_name[name], prefix_bytes[name]
        after = weight.longer(before)
        if after == weight.nbytes:
            if room.hold(name, weight.nbytes, instead_of_pages=weight.pages(before)):
                del prefix_bytes[name]
        elif room.take(weight.pages(after) - weight.pages(before)):
            prefix_bytes[name] = after
            heappush(waiting, entry(weight, turn + 1))


class FreePages:
    """Pages to give away: prefixes get pages of their own, whole weights share pages."""

    def __init__(self, pages: int, page_bytes: int, alignment_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._alignment_bytes = alignment_bytes
        self._pages = pages
        self._held_bytes = 0
        # In the order in which they lie.
        self.held: list[str] = []

    @property
    def left_pages(self) -> int:
        return self._pages - round_up(self._held_bytes, self.page_bytes) // self.page_bytes

    def take(self, pages: int) -> bool:
        if pages > self.left_pages:
            return False
        self._pages -= pages
        return True

    def hold(self, name: str, nbytes: int, *, instead_of_pages: int = 0) -> bool:
        held_bytes = self._held_bytes + round_up(nbytes, self._alignment_bytes)
        if held_bytes > (self._pages + instead_of_pages) * self.page_bytes:
            return False
        self._pages += instead_of_pages
        self._held_bytes = held_bytes
        self.held.append(name)
        return True
