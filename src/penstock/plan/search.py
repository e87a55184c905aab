"""The search for the fastest plan whose weights take the ring in turn: candidates in the order of a bound, each acted
out, and then the neighbours of the best. What is not tried is slower at the best, or was one of too many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.plan.calibration import Calibration
from penstock.plan.fill import EVEN, Draft, Fill
from penstock.plan.menu import Menu
from penstock.plan.packed import SlotSizes
from penstock.plan.plan import Plan
from penstock.plan.ratios import TimeCurve
from penstock.plan.residency import Streaming
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import AS_FAST, CLIMBS, CUTS, LENGTHS, MANY_ACCESSES, MEASURED_TRIALS, MORE_PAGES, Trials


class Point(NamedTuple):
    """A candidate: a set of weights, by number; a cap on their suffixes, and how far copies may run ahead, in pages;
    which part of the spare pages other rows get; where the ring begins anew, in parts of a run."""

    chosen: int
    cap: int
    ahead_pages: int
    part: float = 0.0
    cut: int = 0


class Found(NamedTuple):
    seconds: float
    plan: Plan
    point: Point


def least(plans: Sequence[tuple[float, Plan]]) -> Plan:
    """Of the fastest the one that moves the least."""
    best_s = min(seconds for seconds, _ in plans)
    fast = [plan for seconds, plan in plans if seconds <= best_s * AS_FAST]
    return min(fast, key=lambda plan: sum(method.warm.bytes_streamed for method in plan.methods))


@dataclass(frozen=True)
class Room:
    """A budget, less what packed weights pass through: what streams, is resident or takes another row shares it."""

    menu: Menu
    budget_bytes: int
    slots: SlotSizes | None
    # By which times weights that are split share what they get.
    curves: Mapping[str, TimeCurve]

    @property
    def pages(self) -> int:
        slots_bytes = 0 if self.slots is None else self.slots.total_bytes
        return (self.budget_bytes - slots_bytes) // self.menu.page_bytes

    def finished(self, plan: Plan) -> Plan:
        return self.menu.finished(plan, self.budget_bytes, self.curves, self.slots)


class Search:
    """`sets`: of weights that may stream. `ahead_pages`: room for copies to run ahead, to begin with. `parts`: of the
    spare pages, what other rows may get."""

    def __init__(
        self,
        sets: Sequence[Streaming],
        room: Room,
        calibrations: Sequence[Calibration],
        ahead_pages: int,
        *,
        parts: Sequence[float] = (0.0,),
        least_ahead_pages: int = 0,
        trials: Trials = MEASURED_TRIALS,
    ) -> None:
        budget_pages = room.pages
        self._room = room
        self._parts = parts
        self._choices = [Fill(chosen, budget_pages, room.menu) for chosen in sets]
        self._calibrations = calibrations
        self._ahead_pages = ahead_pages
        self._least_ahead_pages = least_ahead_pages
        self._budget_pages = budget_pages
        accesses = max((chosen.demand.access_count for chosen in sets), default=1)
        # Each draft takes a while then.
        self._is_short = accesses > MANY_ACCESSES
        self._trials_left = trials.of(accesses)
        self._drafts: dict[tuple[int, int, int, float], tuple[float, Draft] | None] = {}
        self._tried: set[Point] = set()
        self._found: list[Found] = []

    def run(self) -> list[tuple[float, Plan]]:
        """All that were tried, with the times that they take. Nothing where none closes."""
        starts = sorted(self._starts())
        enough = self._trials_left // 2
        for _, point in starts:
            if self._trials_left > enough:
                self._try(point)
        for _, point in starts:
            for more in range(1, MORE_PAGES + 1):
                if not self._found:
                    self._try(point._replace(ahead_pages=point.ahead_pages + more))
        for top in sorted(self._found, key=_seconds)[: 0 if self._is_short else CLIMBS]:
            at: Found | None = top
            while at is not None:
                tried = [one for point in self._neighbours(at.point) if (one := self._try(point)) is not None]
                at = min((one for one in tried if one.seconds < at.seconds), key=_seconds, default=None)
        return [(one.seconds, one.plan) for one in self._found]

    def _starts(self) -> list[tuple[float, Point]]:
        """With the least time that each takes."""
        return [
            (drafted[0], point)
            for number, choices in enumerate(self._choices)
            for cap in (choices.caps[:1] if self._is_short else choices.caps)
            for ahead in self._first_aheads(cap)
            for part in self._parts
            if (drafted := self._draft(point := Point(number, cap, ahead, part))) is not None
        ]

    def _first_aheads(self, cap: int) -> set[int]:
        """Beside the usual room a whole suffix, so that stays take turns with two of them; or of equal suffixes more
        and more, since how much pays depends on how uneven steps are."""
        usual = self._ahead_pages
        if self._is_short:
            return {usual}
        if self._least_ahead_pages:
            return {usual, 2 * usual, 4 * usual} if cap == EVEN else {max(usual, cap)}
        if cap != EVEN:
            return {usual, cap}
        return {usual, *(2**k for k in range((self._budget_pages // 4).bit_length()))}

    def _try(self, point: Point) -> Found | None:
        """None where it was tried before, there is no time left, it is slower at the best, or it does not close."""
        if self._trials_left <= 0 or point in self._tried or point.ahead_pages < self._least_ahead_pages:
            return None
        self._tried.add(point)
        drafted = self._draft(point)
        if drafted is None or drafted[0] >= min(map(_seconds, self._found), default=math.inf):
            return None
        draft = drafted[1]
        plan = draft.plan(point.cut / CUTS)
        if plan is None:
            return None
        plan = self._room.finished(plan)
        self._trials_left -= 1
        seconds = sum(predicted_s(plan, self._room.menu.schedules, one) for one in self._calibrations)
        self._found.append(Found(seconds, plan, point))
        return self._found[-1]

    def _draft(self, point: Point) -> tuple[float, Draft] | None:
        """With the least time that its copies take."""
        key = point[:4]
        if key not in self._drafts:
            draft = self._choices[point.chosen].draft(point.cap, point.ahead_pages, point.part)
            self._drafts[key] = None
            if draft is not None:
                times = (draft.least_s(one, self._room.menu, self._budget_pages) for one in self._calibrations)
                self._drafts[key] = sum(times), draft
        return self._drafts[key]

    def _neighbours(self, point: Point) -> Iterator[Point]:
        ahead, cap, caps = point.ahead_pages, point.cap, self._choices[point.chosen].caps
        for other in sorted({0, ahead // 4, ahead // 2, ahead + 1, 2 * ahead, 4 * ahead, cap, 2 * cap}):
            yield point._replace(ahead_pages=other, cut=0)
        others = {cap + 1, cap - 1, cap * 9 // 8, cap * 7 // 8, *(two for two in caps if two * 3 >= cap)}
        for other in sorted(others, key=lambda other: (abs(other - cap), other)):
            if 0 < other <= caps[-1] or other == EVEN:
                yield point._replace(cap=other, cut=0)
                # The ring as many suffixes long as before.
                yield point._replace(cap=other, ahead_pages=round(ahead * other / cap) if cap else ahead, cut=0)
        for part in self._parts:
            yield point._replace(part=part, cut=0)
        yield from self._near_whole_rings(point)[:2]
        for cut in range(1, CUTS):
            yield point._replace(cut=cut)

    def _near_whole_rings(self, point: Point) -> list[Point]:
        """With longer rings, those first with which a run comes out nearest to a whole number of rings."""
        found = []
        grain = max(1, point.ahead_pages // LENGTHS)
        for more in range(grain, 2 * point.ahead_pages, grain):
            longer = point._replace(ahead_pages=point.ahead_pages + more, cut=0)
            drafted = self._draft(longer)
            if drafted is None:
                break
            found.append((max(more, drafted[1].lost_pages), longer))
        return [longer for _, longer in sorted(found)]


def _seconds(found: Found) -> float:
    return found.seconds
