"""How long a prefix each split weight gets: device memory shared out, by times or evenly, in rows and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

from penstock.plan.calibration import Calibration
from penstock.plan.plan import SPLIT_ROWS
from penstock.plan.ratios import Operation, TimeCurve, allocate, uniform
from penstock.plan.tuning import PREFIX_GRAIN_ROWS
from penstock.schedule import Schedule
from penstock.weight import Weight

# Corners of a time curve that are nearer than this are one: between them a slope would be all rounding.
_CORNER_DIGITS = 6


@dataclass(frozen=True)
class Spare:
    """Pages to give away: to prefixes of their own, and to whole weights that share them."""

    pages: int
    page_bytes: int
    alignment_bytes: int


@dataclass(frozen=True)
class Prefixes:
    """What lies on the device of weights that would be read in host memory."""

    # By weight, and never all of it.
    prefix_bytes: Mapping[str, int]
    # Those that lie there as a whole, one after the other.
    whole: tuple[str, ...]


@dataclass(frozen=True)
class SplittableWeight:
    """A weight that may be split: rows, one after the other, and its time by the part of it on the host."""

    name: str
    nbytes: int
    rows: int
    page_bytes: int
    curve: TimeCurve

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows

    @property
    def may_have_prefix(self) -> bool:
        """A prefix takes pages of its own: of a weight that fits in one, all or nothing."""
        return self.nbytes > self.page_bytes and self.rows > SPLIT_ROWS

    def prefix_in(self, pages: int) -> int:
        """Bytes of the longest prefix in so many pages."""
        rows = min(pages * self.page_bytes // self.row_bytes, self.rows - 1)
        return rows // _grain(rows) * _grain(rows) * self.row_bytes

    def longer(self, prefix_bytes: int) -> int:
        """The next longer prefix by whole pages; all of the weight where there is none."""
        rows = prefix_bytes // self.row_bytes
        rows += _grain(rows)
        pages = max(self.pages(prefix_bytes) + 1, self.pages(rows * self.row_bytes))
        return self.nbytes if rows >= self.rows or pages * self.page_bytes >= self.nbytes else self.prefix_in(pages)

    def pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)

    def s_per_byte(self, prefix_bytes: int) -> float:
        """What the next byte of the prefix saves."""
        slope = 0.0
        for (begin, first), (end, last) in pairwise(self.curve.points):
            if begin < 1 - prefix_bytes / self.nbytes:
                slope = (last - first) / (end - begin)
        return slope / self.nbytes


def _grain(rows: int) -> int:
    return PREFIX_GRAIN_ROWS if rows >= PREFIX_GRAIN_ROWS else SPLIT_ROWS


def host_curves(schedules: Sequence[Schedule], calibration: Calibration | None) -> dict[str, TimeCurve]:
    """By weight: what the part of it on the host adds to the steps that multiply by it. Empty where it was not timed.

    With all of a weight in place steps take `direct_s`, with a part of it that part of the time, and never less than
    with none: `resident_s`. Device memory and link are read side by side.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for schedule in schedules:
        resident_s = None if calibration is None else calibration.step_s.get(schedule.method)
        direct_s = None if calibration is None else calibration.direct_step_s.get(schedule.method)
        if resident_s is None or direct_s is None:
            return {}
        for access in schedule.accesses:
            if access.linear:
                step = schedule.first_step[access.number]
                both = times.setdefault(access.weight, {}).setdefault(schedule.method, [0.0, 0.0])
                both[0] += resident_s[step]
                both[1] += direct_s[step]
    return {name: _added(list(by_method.values())) for name, by_method in times.items()}


def _added(methods: Sequence[Sequence[float]]) -> TimeCurve:
    corners = {0.0, 1.0}
    corners.update(round(resident_s / direct_s, _CORNER_DIGITS) for resident_s, direct_s in methods if direct_s)
    return TimeCurve(
        tuple(
            (ratio, sum(max(direct_s * ratio - resident_s, 0.0) for resident_s, direct_s in methods))
            for ratio in sorted(corners)
            if ratio <= 1
        )
    )


def allocate_prefixes(
    weights: Sequence[Weight], tables: Sequence[Weight], curves: Mapping[str, TimeCurve], spare: Spare
) -> Prefixes:
    """Prefixes of weights: equal parts of all, or other parts where their times are known and say so.

    Tables are held whole or not at all, in their order, in what the prefixes leave.
    """
    unknown = TimeCurve(((0.0, 0.0), (1.0, 1.0)))
    splittable = [
        SplittableWeight(one.name, one.nbytes, one.shape[0], spare.page_bytes, curves.get(one.name, unknown))
        for one in weights
    ]
    evenly = _allocated(splittable, tables, spare, by_times=False)
    if not curves:
        return evenly
    # The best parts, in pages, may be worse than equal ones: a part that would cost nothing is less than a page.
    by_times = _allocated(splittable, tables, spare, by_times=True)
    return min(evenly, by_times, key=lambda prefixes: _added_s(splittable, prefixes))


def _added_s(weights: Sequence[SplittableWeight], prefixes: Prefixes) -> float:
    whole = frozenset(prefixes.whole)
    left_out = ((weight, 1 - prefixes.prefix_bytes.get(weight.name, 0) / weight.nbytes) for weight in weights)
    return sum(weight.curve.seconds(0 if weight.name in whole else ratio) for weight, ratio in left_out)


def _allocated(
    weights: Sequence[SplittableWeight], tables: Sequence[Weight], spare: Spare, *, by_times: bool
) -> Prefixes:
    room = FreePages(spare)
    for weight in sorted(
        (weight for weight in weights if not weight.may_have_prefix), key=lambda weight: weight.nbytes
    ):
        room.hold(weight.name, weight.nbytes)
    large = sorted((weight for weight in weights if weight.may_have_prefix), key=lambda weight: -weight.nbytes)
    operations = [Operation(weight.name, weight.nbytes, weight.curve) for weight in large]
    left_out = max(0.0, 1 - room.left_pages * room.page_bytes / max(sum(weight.nbytes for weight in large), 1))
    found = allocate(operations, left_out) if by_times else uniform(operations, left_out)
    prefix_bytes: dict[str, int] = {}
    for weight, ratio in zip(large, found.ratios, strict=True):
        if ratio > 0 or not room.hold(weight.name, weight.nbytes):
            pages = int((1 - ratio) * weight.nbytes) // room.page_bytes
            prefix_bytes[weight.name] = weight.prefix_in(min(pages, room.left_pages))
            room.take(weight.pages(prefix_bytes[weight.name]))
    _use_up(large, prefix_bytes, room, by_times=by_times)
    for table in tables:
        room.hold(table.name, table.nbytes)
    return Prefixes({name: nbytes for name, nbytes in prefix_bytes.items() if nbytes}, tuple(room.held))


def _use_up(
    weights: Sequence[SplittableWeight], prefix_bytes: dict[str, int], room: FreePages, *, by_times: bool
) -> None:
    """What rounding has left goes where it saves the most; of equals to each in turn, the largest first."""

    def entry(weight: SplittableWeight, turn: int) -> tuple[float, int, int, str]:
        return -weight.s_per_byte(prefix_bytes[weight.name]) if by_times else 0.0, turn, -weight.nbytes, weight.name

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
    """What is left of it."""

    def __init__(self, spare: Spare) -> None:
        self.page_bytes = spare.page_bytes
        self._alignment_bytes = spare.alignment_bytes
        self._pages = spare.pages
        self._held_bytes = 0
        # In the order in which they lie.
        self.held: list[str] = []

    @property
    def left_pages(self) -> int:
        return self._pages - self._shared_pages(0)

    def take(self, pages: int) -> bool:
        if pages > self.left_pages:
            return False
        self._pages -= pages
        return True

    def hold(self, name: str, nbytes: int, *, instead_of_pages: int = 0) -> bool:
        if self._shared_pages(nbytes) > self._pages + instead_of_pages:
            return False
        self._pages += instead_of_pages
        self._held_bytes += self._aligned(nbytes)
        self.held.append(name)
        return True

    def _shared_pages(self, more_bytes: int) -> int:
        return -(-(self._held_bytes + self._aligned(more_bytes)) // self.page_bytes)

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment_bytes) * self._alignment_bytes
