"""The search for the fastest plan within a budget: candidates in the order of a lower bound, each acted out, then the
neighbours of the best. What is not tried cannot be faster, or was one of too many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.plan.calibration import Calibration
from penstock.plan.candidates import EVEN, Draft, Streaming, draft, least_ring
from penstock.plan.experts import guessed_bytes_after_prompt
from penstock.plan.in_place import HostTimes
from penstock.plan.menu import Menu
from penstock.plan.packed import SlotSizes
from penstock.plan.plan import Plan
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import (
    AHEAD_TIMES,
    AS_FAST,
    CAP_FACTOR,
    CLIMBS,
    CUTS,
    LEAST_CAP_PART,
    LOOKAHEAD_BYTES,
    LOOKAHEAD_PART,
    LOOKAHEAD_PART_OF_STREAM,
    MANY_ACCESSES,
    MEASURED_PARTS,
    MEASURED_TRIALS,
    MORE_PAGES,
    NEIGHBOURS_SHARE,
    NEXT_AHEAD_TIMES,
    NEXT_CAP_TIMES,
    NOMINAL_TRIALS,
    PACKED_PARTS,
)


class Point(NamedTuple):
    """A candidate: the number of a set of weights, a cap on their suffixes, how far copies may run ahead (in pages),
    which part of the spare pages other rows get, and where the ring begins anew (in parts of a run)."""

    chosen: int
    cap: int
    ahead_pages: int
    part: float = 0.0
    cut: int = 0


class Found(NamedTuple):
    seconds: float
    plan: Plan
    point: Point | None = None


def least(found: Sequence[Found]) -> Found:
    """Of the fastest plans, the one that moves the least."""
    best_s = min(one.seconds for one in found)
    fast = [one for one in found if one.seconds <= best_s * AS_FAST]
    return min(fast, key=lambda one: sum(method.warm.bytes_streamed for method in one.plan.methods))


@dataclass(frozen=True)
class Judge:
    """Judges plans by times: measured ones, or nominal ones that stand for all machines."""

    menu: Menu
    calibrations: Sequence[Calibration]
    is_measured: bool
    # Split weights share the pages they get by these times.
    host_times: HostTimes
    # For a draft fewer candidates are tried.
    is_draft: bool

    def judges_as(self, other: Judge) -> bool:
        return self.calibrations == other.calibrations and self.is_draft == other.is_draft

    def predicted_s(self, plan: Plan) -> float:
        return sum(predicted_s(plan, self.menu.schedules, one) for one in self.calibrations)

    def seconds(self, plan: Plan) -> float:
        """The time by which plans are compared."""
        menu, expert_bytes = self.menu, self.menu.bytes_after_prompt(plan)
        return sum(
            predicted_s(plan, menu.schedules, one, menu.runs) + expert_bytes / one.link.bytes_per_s
            for one in self.calibrations
        )

    def least_s(self, drafted: Draft, budget_pages: int) -> float:
        return sum(drafted.least_s(one, self.menu, budget_pages) for one in self.calibrations)

    def guessed_expert_s(self, drafted: Draft, expert_pages: int) -> float:
        """The time for experts that a draft is judged by, beside the times of runs, before it is laid."""
        streamed = self.menu.streamed_experts & drafted.suffixes.keys()
        streamed_bytes = sum(self.menu.weights[name].nbytes for name in streamed)
        expert_bytes = guessed_bytes_after_prompt(streamed_bytes, expert_pages * self.menu.page_bytes)
        return sum(expert_bytes / one.link.bytes_per_s for one in self.calibrations)

    def bound_s(self, budget_bytes: int) -> float:
        """No plan takes less: a method's weights cross the link once, less what the budget holds; and all steps run."""
        nbytes = self.menu.demand.nbytes
        part = self.menu.packed_part if self.menu.begins else 1.0
        streamed = {
            schedule.method: sum(nbytes.get(name, 0) for name in schedule.weight_names) * part - budget_bytes
            for schedule in self.menu.demand.schedules
        }
        return sum(
            max(streamed[method] / one.link.bytes_per_s, one.resident_s(method))
            for one in self.calibrations
            for method in one.step_s
        )

    @property
    def parts(self) -> tuple[float, ...]:
        """Which parts of the spare pages to try for other rows. Without times, what streams comes before what is read
        in place: that makes the ring shorter, and a byte costs the same."""
        if self.is_measured and self.menu.has_other_rows:
            return MEASURED_PARTS
        return PACKED_PARTS if self.menu.begins else (0.0,)


class Search:
    """`sets`: of weights that may stream. `laid`: drafts that are laid already. They share the budget with the slots
    that packed weights pass through (one of `slots`), with pages kept for experts, and with all other rows."""

    def __init__(
        self,
        judge: Judge,
        budget_bytes: int,
        slots: Sequence[SlotSizes],
        sets: Sequence[Streaming],
        laid: Sequence[Draft] = (),
        expert_pages: int = 0,
    ) -> None:
        self._judge = judge
        self._budget_bytes = budget_bytes
        self._slots = slots[0] if slots else None
        self._sets = sets
        self._laid = laid
        self._best_s = math.inf
        demand = judge.menu.demand
        self._expert_pages = expert_pages
        self._pages = (budget_bytes - (slots[0].total_bytes if slots else 0)) // demand.page_bytes - expert_pages
        # With so many accesses each draft takes a while.
        self._is_short = demand.access_count > MANY_ACCESSES
        trials = MEASURED_TRIALS if judge.is_measured and not judge.is_draft else NOMINAL_TRIALS
        self._trials_left = trials.of(demand.access_count)
        self._drafts: dict[tuple[int, int, int, float], tuple[float, Draft] | None] = {}
        self._least_rings: dict[tuple[int, int, float], int | None] = {}
        self._tried: set[Point] = set()
        self._found: list[Found] = []

    def run(self) -> list[Found]:
        """All plans that were tried; none if no ring closes."""
        for laid in self._laid:
            self._judged(laid.plan(), None)
        starts = sorted(self._starts())
        enough = self._trials_left // NEIGHBOURS_SHARE
        for _, point in starts:
            if self._trials_left > enough:
                self._try(point)
        for _, point in starts:
            for more in range(1, MORE_PAGES + 1):
                if not self._found:
                    self._try(point._replace(ahead_pages=point.ahead_pages + more))
        for top in sorted(self._found, key=_seconds)[: 0 if self._is_short else CLIMBS]:
            at: Found | None = top
            while at is not None and at.point is not None:
                tried = [one for point in self._neighbours(at.point) if (one := self._try(point)) is not None]
                at = min((one for one in tried if one.seconds < at.seconds), key=_seconds, default=None)
        return self._found

    @property
    def _usual_ahead_pages(self) -> int:
        demand = self._judge.menu.demand
        return max(
            1,
            min(
                LOOKAHEAD_BYTES // demand.page_bytes,
                self._pages // LOOKAHEAD_PART,
                (demand.full_pages - self._pages) // LOOKAHEAD_PART_OF_STREAM,
            ),
        )

    def _starts(self) -> list[tuple[float, Point]]:
        """First candidates, each with a lower bound on its time, by which they are ordered."""
        return [
            (drafted[0] + self._judge.guessed_expert_s(drafted[1], self._expert_pages), point)
            for number, streaming in enumerate(self._sets)
            for cap in self._caps(streaming)
            for ahead in self._first_aheads(cap)
            for part in self._judge.parts
            if (drafted := self._draft(point := Point(number, cap, ahead, part))) is not None
        ]

    def _caps(self, streaming: Streaming) -> list[int]:
        largest = max(streaming.whole.values())
        cap = streaming.least_cap(streaming.demand.full_pages - self._pages)
        found = [EVEN]
        while not self._is_short and cap < largest:
            found.append(cap)
            cap = max(cap + 1, math.ceil(cap * CAP_FACTOR))
        return found if self._is_short else [*found, largest]

    def _first_aheads(self, cap: int) -> set[int]:
        """The usual room, and a whole suffix, so that stays take turns with two of them. For equal suffixes, more and
        more room: how much pays off depends on how uneven steps are."""
        usual = self._usual_ahead_pages
        if self._is_short:
            return {usual}
        if not self._judge.is_measured:
            return {times * usual for times in AHEAD_TIMES} if cap == EVEN else {max(usual, cap)}
        return {usual, cap} if cap != EVEN else {usual, *(2**k for k in range((self._pages // 4).bit_length()))}

    def _try(self, point: Point) -> Found | None:
        """None if it was tried before, no trials are left, its lower bound is too slow, or it does not close."""
        if self._trials_left <= 0 or point in self._tried:
            return None
        if not self._judge.is_measured and point.ahead_pages < self._usual_ahead_pages:
            return None
        self._tried.add(point)
        drafted = self._draft(point)
        if drafted is None or drafted[0] >= self._best_s:
            return None
        return self._judged(drafted[1].plan(point.cut / CUTS), point)

    def _judged(self, plan: Plan | None, point: Point | None) -> Found | None:
        if plan is None:
            return None
        self._trials_left -= 1
        given = self._budget_bytes, self._judge.host_times, self._slots, self._expert_pages
        plan = self._judge.menu.finished(plan, *given)
        self._found.append(Found(self._judge.seconds(plan), plan, point))
        self._best_s = min(self._best_s, self._found[-1].seconds)
        return self._found[-1]

    def _draft(self, point: Point) -> tuple[float, Draft] | None:
        """The draft, with a lower bound on the time of its copies."""
        key = point[:4]
        if key not in self._drafts:
            drafted = self._drafted(*key)
            self._drafts[key] = None if drafted is None else (self._judge.least_s(drafted, self._pages), drafted)
        return self._drafts[key]

    def _drafted(self, chosen: int, cap: int, ahead_pages: int, part: float) -> Draft | None:
        given = self._sets[chosen], self._judge.menu, self._pages, cap
        if (chosen, cap, part) not in self._least_rings:
            self._least_rings[chosen, cap, part] = least_ring(*given, part)
        least_pages = self._least_rings[chosen, cap, part]
        return None if least_pages is None else draft(*given, least_pages + ahead_pages, part)

    def _neighbours(self, point: Point) -> Iterator[Point]:
        ahead, cap = point.ahead_pages, point.cap
        for other in sorted({0, ahead + 1, cap, 2 * cap, *(int(ahead * times) for times in NEXT_AHEAD_TIMES)}):
            yield point._replace(ahead_pages=other, cut=0)
        caps = self._caps(self._sets[point.chosen])
        near = {int(cap * times) for times in NEXT_CAP_TIMES}
        others = {cap + 1, cap - 1, *near, *(two for two in caps if two * LEAST_CAP_PART >= cap)}
        for other in sorted(others, key=lambda other: (abs(other - cap), other)):
            if 0 < other <= caps[-1] or other == EVEN:
                yield point._replace(cap=other, cut=0)
                # This keeps the ring as many suffixes long as before.
                yield point._replace(cap=other, ahead_pages=round(ahead * other / cap) if cap else ahead, cut=0)
        for part in self._judge.parts:
            yield point._replace(part=part, cut=0)
        for cut in range(1, CUTS):
            yield point._replace(cut=cut)


def _seconds(found: Found) -> float:
    return found.seconds
