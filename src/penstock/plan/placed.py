"""Choices whose ranges have pages from the step before their first reader on: the floor's own, and weights kept between
uses. Copies overlap with steps whatever these take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.plan.assembly import assemble
from penstock.plan.candidate_sets import CandidateSets
from penstock.plan.plan import Plan
from penstock.plan.residency import Streaming, streaming_suffixes
from penstock.plan.ring import allocate, lay, loads, most_pages, shortest
from penstock.plan.tuning import LOOKAHEAD_BYTES, LOOKAHEAD_PART


@dataclass(frozen=True)
class Placed:
    """A choice, the length of the ring that it needs, and by method where its line begins."""

    chosen: Streaming
    suffixes: Mapping[str, int]
    ring_pages: int
    cuts: tuple[int, ...]

    @cached_property
    def total_pages(self) -> int:
        return self.chosen.resident_pages(self.suffixes) + self.ring_pages

    @cached_property
    def cost_bytes(self) -> int:
        return self.chosen.cost_bytes(self.suffixes)

    def plan(self, budget_pages: int) -> Plan:
        """What is left of the budget goes to the ring, so that copies run further ahead."""
        methods, demand = self.chosen.methods, self.chosen.demand
        ring_pages = self.ring_pages + budget_pages - self.total_pages
        rings = []
        for method, cut in zip(methods, self.cuts, strict=True):
            ring = allocate(method, self.suffixes, cut, ring_pages=ring_pages)
            assert ring is not None, "more pages than are needed are enough"
            rings.append(ring)
        return assemble(demand, self.suffixes, methods, *lay(methods, rings, demand))

    def worst_step(self) -> tuple[str | None, int | None, tuple[str, ...]]:
        """The method and step with the largest load, of equals the first, and the weights that make it."""
        worst: tuple[int, str, int, tuple[str, ...]] | None = None
        for schedule, method in zip(self.chosen.demand.schedules, self.chosen.methods, strict=True):
            by_step = loads(method, self.suffixes)
            if not method.live_ranges or (worst is not None and max(by_step) <= worst[0]):
                continue
            step = by_step.index(max(by_step))
            names = tuple(
                live.weight
                for live in method.live_ranges
                if (step - live.begin_step) % method.step_count <= live.end_step - live.begin_step
            )
            worst = (by_step[step], schedule.method, step, names)
        return (None, None, ()) if worst is None else worst[1:]


def place(chosen: Streaming, suffixes: Mapping[str, int], *, enough_pages: int = 0) -> Placed:
    """`enough_pages` in all are good enough; without, as few as can be found."""
    enough_pages -= chosen.resident_pages(suffixes)
    found = [shortest(method, suffixes, enough_pages=enough_pages) for method in chosen.methods]
    return Placed(chosen, suffixes, max((pages for pages, _ in found), default=0), tuple(cut for _, cut in found))


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
    """Whether `lowest` fits, as far as the choices that are worked out tell without giving any pages."""
    return any(_surely_fits(chosen, budget_pages) for chosen in sets.worked_out)


def _surely_fits(chosen: Streaming, budget_pages: int) -> bool:
    room_pages = budget_pages - chosen.resident_pages(chosen.whole)
    return all(most_pages(method, chosen.whole) <= room_pages for method in chosen.methods)


def lengthen_prefixes(placed: Placed, budget_pages: int) -> Placed:
    """What is left of the budget, but for what copies need to run ahead, goes to the prefixes."""
    chosen = placed.chosen
    reserved = min(LOOKAHEAD_BYTES // chosen.demand.page_bytes, budget_pages // LOOKAHEAD_PART)
    spare_pages = budget_pages - placed.total_pages - reserved
    if spare_pages <= 0:
        return placed
    suffixes = {name: suffix for name, suffix in chosen.shorten(placed.suffixes, spare_pages).items() if suffix}
    longer = place(streaming_suffixes(chosen, suffixes), suffixes, enough_pages=budget_pages)
    # Seldom do shorter suffixes need more pages on a cycle.
    return longer if longer.total_pages <= budget_pages else placed
