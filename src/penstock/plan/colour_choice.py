"""Choices whose stays have pages by colouring: the floor's own, and others where stays are of very different lengths.

Every stay has its pages from the step before its first reader on, and often earlier, so that copies overlap with steps
whatever these take. Such a ring is larger than one that is taken in laps, but it may hold any stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.plan.assembly import assemble
from penstock.plan.candidate_sets import CandidateSets
from penstock.plan.plan import Plan
from penstock.plan.residency import Streaming, streaming_tails
from penstock.plan.ring import Colouring, colour, lay_coloured, loads, most_pages, peak_load, shrink
from penstock.plan.stays import MethodArcs, look_ahead
from penstock.plan.tuning import COLOUR_ATTEMPTS, LOOKAHEAD_BYTES, LOOKAHEAD_PART, MANY_ACCESSES


@dataclass(frozen=True)
class Placed:
    """A choice whose stays have pages."""

    chosen: Streaming
    tails: Mapping[str, int]
    colourings: tuple[Colouring, ...]

    @property
    def ring_pages(self) -> int:
        return max((coloured.page_count for coloured in self.colourings), default=0)

    @cached_property
    def total_pages(self) -> int:
        return self.chosen.resident_pages(self.tails) + self.ring_pages

    @cached_property
    def cost_bytes(self) -> int:
        return self.chosen.cost_bytes(self.tails)

    def plan(self) -> Plan:
        methods, demand = self.chosen.methods, self.chosen.demand
        laid = [lay_coloured(method, coloured) for method, coloured in zip(methods, self.colourings, strict=True)]
        held = [name for name in demand.nbytes if name not in self.tails]
        return assemble(demand, held, self.tails, methods, laid, self.ring_pages)

    def worst_step(self) -> tuple[str | None, int | None, tuple[str, ...]]:
        """The method and step with the largest load, of equals the first, and the weights that make it."""
        worst: tuple[int, str, int, tuple[str, ...]] | None = None
        for schedule, method in zip(self.chosen.demand.schedules, self.chosen.methods, strict=True):
            by_step = loads(method, self.tails)
            if not method.arcs or (worst is not None and max(by_step) <= worst[0]):
                continue
            step = by_step.index(max(by_step))
            names = tuple(
                arc.weight
                for arc in method.arcs
                if (step - arc.begin_step) % method.step_count <= arc.end_step - arc.begin_step
            )
            worst = (by_step[step], schedule.method, step, names)
        return (None, None, ()) if worst is None else worst[1:]


def place(chosen: Streaming, tails: Mapping[str, int], *, enough_pages: int = 0) -> Placed:
    """`enough_pages` in all are good enough; without, as few as can be found."""
    enough_pages -= chosen.resident_pages(tails)
    return Placed(chosen, tails, tuple(colour(method, tails, enough_pages=enough_pages) for method in chosen.methods))


def lowest(sets: CandidateSets) -> Placed:
    """The choice that needs the fewest pages when everything that may stream does. Of equals, the cheapest to run."""
    best: Placed | None = None
    for bound, chosen in sets.lowest_first():
        if best is not None:
            if best.total_pages < bound:
                break
            # It could only be cheaper, and is not.
            if best.total_pages == bound and chosen.cost_bytes(chosen.whole) >= best.cost_bytes:
                continue
        placed = place(chosen, chosen.whole)
        if best is None or (placed.total_pages, placed.cost_bytes) < (best.total_pages, best.cost_bytes):
            best = placed
    assert best is not None, "one choice is to hold everything"
    return best


def surely_fits(sets: CandidateSets, budget_pages: int) -> bool:
    """Whether `lowest` fits, as far as the choices that are worked out tell without any colouring."""
    return any(_surely_fits(chosen, budget_pages) for chosen in sets.worked_out)


def _surely_fits(chosen: Streaming, budget_pages: int) -> bool:
    room_pages = budget_pages - chosen.resident_pages(chosen.whole)
    return all(most_pages(method, chosen.whole) <= room_pages for method in chosen.methods)


def cheapest(sets: CandidateSets, budget_pages: int, below_cost_bytes: int | None) -> Placed | None:
    """The cheapest choice that fits, its heads as long as the budget allows; None where none costs less than that."""

    def estimate(chosen: Streaming, level: int) -> tuple[int, int, Streaming]:
        tails = chosen.level(level)
        used_pages = chosen.resident_pages(tails) + chosen.ring_load(tails)
        return chosen.cost_bytes(chosen.shorten(tails, _spare(chosen, budget_pages, used_pages))), level, chosen

    def too_dear(cost_bytes: int) -> bool:
        return below_cost_bytes is not None and cost_bytes >= below_cost_bytes

    candidates: list[tuple[int, int, Streaming]] = []
    for least_bytes, candidate in sets.cheapest_first(budget_pages):
        if too_dear(least_bytes):
            break
        for chosen in candidate.variants:
            level = None if too_dear(chosen.least_cost_bytes(budget_pages)) else chosen.lowest_level(budget_pages)
            if level is not None:
                candidates.append(estimate(chosen, level))
    for _ in range(COLOUR_ATTEMPTS):
        if not candidates:
            break
        index = min(range(len(candidates)), key=lambda i: candidates[i][:2])
        cost, level, chosen = candidates.pop(index)
        if too_dear(cost):
            break
        placed = place(chosen, chosen.level(level), enough_pages=budget_pages)
        if placed.total_pages <= budget_pages:
            return lengthen_heads(placed, budget_pages)
        if level < chosen.largest_pages:
            candidates.append(estimate(chosen, level + 1))
    return None


def lengthen_heads(placed: Placed, budget_pages: int) -> Placed:
    """What is left of the budget, but for what copies need to run ahead, goes to the heads."""
    chosen = placed.chosen
    spare_pages = _spare(chosen, budget_pages, placed.total_pages)
    return shorter(placed, chosen.shorten(placed.tails, spare_pages)) if spare_pages else placed


def _spare(chosen: Streaming, budget_pages: int, used_pages: int) -> int:
    reserved = min(LOOKAHEAD_BYTES // chosen.demand.page_bytes, budget_pages // LOOKAHEAD_PART)
    return max(budget_pages - used_pages - reserved, 0)


def shorter(placed: Placed, tails: Mapping[str, int]) -> Placed:
    """The same pages for shorter tails. Giving some back never needs more, where colouring again might."""
    chosen = streaming_tails(placed.chosen, tails)
    colourings = []
    for before, after, coloured in zip(placed.chosen.methods, chosen.methods, placed.colourings, strict=True):
        held = {arc.positions: extents for arc, extents in zip(before.arcs, coloured.extents, strict=True)}
        colourings.append(
            shrink([held[arc.positions] for arc in after.arcs], [tails[arc.weight] for arc in after.arcs])
        )
    return Placed(chosen, {name: tail for name, tail in tails.items() if tail}, tuple(colourings))


def run_ahead(placed: Placed, budget_pages: int) -> Placed:
    """What is left of the budget goes to the ring, so that copies run further ahead; each method takes what it can."""
    tails = placed.tails
    limit_pages = budget_pages - placed.chosen.resident_pages(tails)
    if limit_pages <= placed.ring_pages:
        return placed
    many = placed.chosen.demand.access_count > MANY_ACCESSES
    colourings: list[Colouring] = []
    methods = []
    for method, coloured in zip(placed.chosen.methods, placed.colourings, strict=True):
        best, best_colouring = method, coloured
        # From what fits by load less and less, until the stays find pages too. A guess has to do where arcs are many.
        ahead_pages = limit_pages - placed.ring_pages if many else _most_ahead(method, tails, limit_pages)
        while ahead_pages:
            longer = look_ahead(method, tails, ahead_pages)
            if longer.arcs == method.arcs:
                break
            again = colour(longer, tails, enough_pages=limit_pages)
            if again.page_count <= limit_pages:
                best, best_colouring = longer, again
                break
            ahead_pages = 0 if many else ahead_pages * 3 // 4
        methods.append(best)
        colourings.append(best_colouring)
    return Placed(replace(placed.chosen, methods=tuple(methods)), tails, tuple(colourings))


def _most_ahead(method: MethodArcs, tails: Mapping[str, int], limit_pages: int) -> int:
    """About as many pages as may be ahead by load."""
    low, high = 0, min(limit_pages, sum(tails[arc.weight] for arc in method.arcs))
    while low + high // 16 < high:
        middle = (low + high + 1) // 2
        if peak_load(look_ahead(method, tails, middle), tails) <= limit_pages:
            low = middle
        else:
            high = middle - 1
    return low
