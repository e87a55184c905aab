"""The planner: from schedules, sizes and a budget to a plan. Pure and deterministic; the authority on the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.errors import BelowFloorError
from penstock.plan import floor
from penstock.plan.assembly import assemble
from penstock.plan.calibration import Calibration
from penstock.plan.laps import lay_in_laps, lost_pages
from penstock.plan.plan import Plan
from penstock.plan.residency import Demand, Streaming, size_classes, streaming, streaming_tails
from penstock.plan.ring import Colouring, colour, lay_coloured, loads, peak_load, reading_load, shrink
from penstock.plan.simulator import simulate
from penstock.plan.stays import LaidStay, look_ahead
from penstock.schedule import Schedule
from penstock.weight import Weight

# Room that is left to copies running ahead rather than spent on longer heads: 0.6 ms of a link of 55 GB/s, which
# bridges steps of uneven length. Never more than this part of the budget.
LOOKAHEAD_BYTES = 32 * 2**20
LOOKAHEAD_PART = 32
# In laps, never more than this part of what does not fit either: it would cost more than the steps it bridges.
LOOKAHEAD_PART_OF_STREAM = 96

# How many lengths of the ring are tried within the lookahead: a run should come out near a whole number of laps.
LAP_TRIALS = 8
# With times at hand: the places tried for the cut, and for how many of the best rings.
CUT_TRIALS = 8
CUT_RINGS = 3
# Laps that cost no more than 100/80 of the least that anything can are good enough not to look further.
LAPS_GOOD_PART = 80

# How often a choice whose load fits may turn out not to fit once its stays have pages, before the floor's is taken.
ATTEMPTS = 24


@dataclass(frozen=True)
class FloorPlan:
    """The floor, the plan that meets it, and what sets it. `method` and `step_index` are None when nothing streams."""

    floor_bytes: int
    plan: Plan
    resident_bytes: int
    ring_bytes: int
    method: str | None
    step_index: int | None
    # The weights in the ring at that step: in place, or on their way.
    weights: tuple[str, ...]


@dataclass(frozen=True)
class _Laps:
    """A choice whose stays take the ring in laps."""

    chosen: Streaming
    tails: Mapping[str, int]
    laid: tuple[tuple[LaidStay, ...], ...]
    ring_pages: int
    # A bound: no choice at this budget costs less.
    least_bytes: int = 0

    @property
    def cost_bytes(self) -> int:
        return self.chosen.cost_bytes(self.tails)


@dataclass(frozen=True)
class _Placed:
    """A choice whose stays have pages."""

    chosen: Streaming
    tails: Mapping[str, int]
    colourings: tuple[Colouring, ...]

    @property
    def ring_pages(self) -> int:
        return max((coloured.page_count for coloured in self.colourings), default=0)

    @property
    def total_pages(self) -> int:
        return self.chosen.resident_pages(self.tails) + self.ring_pages

    @property
    def rank(self) -> tuple[int, int]:
        return self.total_pages, self.chosen.cost_bytes(self.tails)


class Planner:
    """The plans of one program at different budgets: what they have in common is worked out once."""

    def __init__(self, schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int) -> None:
        # Refuses page sizes and schedules that break their own rules.
        floor.floor_bytes(schedules, weights, granularity_bytes=page_bytes)
        self._demand = Demand.of(schedules, weights, page_bytes)
        self._choices = [streaming(self._demand, names) for names in size_classes(self._demand)]
        self._lowest = _lowest(self._choices)
        self._page_bytes = page_bytes

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that `plan` accepts."""
        return self._lowest.total_pages * self._page_bytes

    @property
    def full_bytes(self) -> int:
        """Device bytes of the plan that streams nothing. A larger budget buys nothing."""
        return self._demand.held_pages(self._demand.nbytes) * self._page_bytes

    def floor(self) -> FloorPlan:
        plan = _assemble(self._lowest)
        method, step_index, names = _worst(self._lowest)
        return FloorPlan(
            floor_bytes=self.floor_bytes,
            plan=plan,
            resident_bytes=plan.resident_bytes,
            ring_bytes=plan.ring_bytes,
            method=method,
            step_index=step_index,
            weights=names,
        )

    def plan(self, budget_bytes: int, calibration: Calibration | None = None) -> Plan:
        """The plan that takes the least time within the budget, or without a calibration the one that moves the least.

        Raises BelowFloorError where no plan is safe and still overlaps.
        """
        if budget_bytes < self.floor_bytes:
            raise BelowFloorError(
                f"the budget is {budget_bytes} bytes, but the floor is {self.floor_bytes} bytes: "
                f"{_reason(self._lowest)}",
                budget_bytes=budget_bytes,
                floor_bytes=self.floor_bytes,
            )
        if budget_bytes >= self.full_bytes:
            return _assemble(_place(streaming(self._demand, ()), {}))
        budget_pages = budget_bytes // self._page_bytes
        if calibration is not None:
            return self._fastest(budget_pages, calibration)
        laps = _best_laps(self._choices, budget_pages, self._usual_ahead_pages(budget_pages))
        if laps is not None and laps.cost_bytes * LAPS_GOOD_PART <= laps.least_bytes * 100:
            return _assemble_laps(laps)
        coloured = _best(self._choices, self._lowest, budget_pages)
        if laps is not None and laps.cost_bytes < coloured.chosen.cost_bytes(coloured.tails):
            return _assemble_laps(laps)
        return _assemble(_ahead(coloured, budget_pages))

    def _usual_ahead_pages(self, budget_pages: int) -> int:
        streamed_pages = self._demand.held_pages(self._demand.nbytes) - budget_pages
        return min(
            LOOKAHEAD_BYTES // self._page_bytes,
            budget_pages // LOOKAHEAD_PART,
            streamed_pages // LOOKAHEAD_PART_OF_STREAM,
        )

    def _fastest(self, budget_pages: int, calibration: Calibration) -> Plan:
        """Of plans with more and more room for copies to run ahead, the one whose runs take the least time.

        Room costs bytes that could have been resident. How much of it pays depends on how uneven steps and copies are,
        which only acting out tells.
        """
        tried: list[_Laps] = []
        ahead_pages = 1
        while ahead_pages <= budget_pages // 4:
            laps = _best_laps(self._choices, budget_pages, ahead_pages)
            if laps is None:
                break
            tried.append(laps)
            ahead_pages *= 2
        if not tried:
            return _assemble(_ahead(_best(self._choices, self._lowest, budget_pages), budget_pages))

        def seconds(plan: Plan) -> float:
            return self.predicted_s(plan, calibration)

        uncut = sorted(((_assemble_laps(laps), laps) for laps in tried), key=lambda pair: seconds(pair[0]))
        plans = [uncut[0][0]]
        # Where the laps begin anew, copies lose some of their lead: a long step is a bad place for that.
        for _, laps in uncut[:CUT_RINGS]:
            for part in range(1, CUT_TRIALS):
                again = _cut_elsewhere(laps, part, CUT_TRIALS)
                if again is not None:
                    plans.append(_assemble_laps(again))
        return min(plans, key=seconds)

    def predicted_s(self, plan: Plan, calibration: Calibration) -> float:
        """One warm run of every method that was calibrated, back to back with others of its own."""
        return sum(
            simulate(method, schedule, step_s=calibration.step_s[method.method], link=calibration.link).run_s
            for method, schedule in zip(plan.methods, self._demand.schedules, strict=True)
            if method.method in calibration.step_s
        )


def make_plan(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, budget_bytes: int, page_bytes: int
) -> Plan:
    return Planner(schedules, weights, page_bytes=page_bytes).plan(budget_bytes)


def placed_floor(schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int) -> FloorPlan:
    return Planner(schedules, weights, page_bytes=page_bytes).floor()


def full_bytes(schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int) -> int:
    return Planner(schedules, weights, page_bytes=page_bytes).full_bytes


def _place(chosen: Streaming, tails: Mapping[str, int]) -> _Placed:
    return _Placed(chosen, tails, tuple(colour(method, tails) for method in chosen.methods))


def _lowest(choices: Sequence[Streaming]) -> _Placed:
    """The choice that needs the fewest pages when everything that may stream does. Of equals, the cheapest to run."""
    bounds = [choice.resident_pages(choice.whole) + choice.ring_load(choice.whole) for choice in choices]
    best: _Placed | None = None
    for bound, choice in sorted(zip(bounds, choices, strict=True), key=lambda pair: pair[0]):
        if best is not None and best.total_pages < bound:
            break
        placed = _place(choice, choice.whole)
        if best is None or placed.rank < best.rank:
            best = placed
    assert best is not None, "one choice is to hold everything"
    return best


def _spare_for_heads(budget_pages: int, used_pages: int, page_bytes: int) -> int:
    reserved = min(LOOKAHEAD_BYTES // page_bytes, budget_pages // LOOKAHEAD_PART)
    return max(budget_pages - used_pages - reserved, 0)


def _best(choices: Sequence[Streaming], lowest: _Placed, budget_pages: int) -> _Placed:
    """The cheapest choice that fits, its heads as long as the budget allows."""

    def shortened(chosen: Streaming, tails: Mapping[str, int], used_pages: int) -> dict[str, int]:
        return chosen.shorten(tails, _spare_for_heads(budget_pages, used_pages, chosen.demand.page_bytes))

    def estimate(chosen: Streaming, level: int) -> tuple[int, int, Streaming]:
        tails = chosen.level(level)
        used_pages = chosen.resident_pages(tails) + chosen.ring_load(tails)
        return chosen.cost_bytes(shortened(chosen, tails, used_pages)), level, chosen

    floors_own = shortened(lowest.chosen, lowest.tails, lowest.total_pages)
    floors_cost = lowest.chosen.cost_bytes(floors_own)

    candidates: list[tuple[int, int, Streaming]] = []
    for chosen in _by_frequency(choices):
        level = chosen.lowest_level(budget_pages)
        if level is not None:
            candidates.append(estimate(chosen, level))
    for _ in range(ATTEMPTS):
        if not candidates:
            break
        index = min(range(len(candidates)), key=lambda i: candidates[i][:2])
        cost, level, chosen = candidates.pop(index)
        if cost >= floors_cost:
            break
        placed = _place(chosen, chosen.level(level))
        if placed.total_pages <= budget_pages:
            return _cut(placed, shortened(chosen, placed.tails, placed.total_pages))
        if level < chosen.largest_pages:
            candidates.append(estimate(chosen, level + 1))
    return _cut(lowest, floors_own)


def _by_frequency(choices: Sequence[Streaming]) -> list[Streaming]:
    """Each choice, and beside it the one in which the weights that stream more often than others are held whole."""
    variants: list[Streaming] = []
    for choice in choices:
        if not choice.stays:
            continue
        variants.append(choice)
        least = min(choice.stays.values())
        if max(choice.stays.values()) > least:
            seldom = [name for name, count in choice.stays.items() if count == least]
            variants.append(streaming(choice.demand, seldom))
    return [variant for variant in variants if variant.stays]


def _cut(placed: _Placed, tails: Mapping[str, int]) -> _Placed:
    """The same pages for shorter tails. Giving some back never needs more, where colouring again might."""
    chosen = streaming_tails(placed.chosen, tails)
    colourings = []
    for before, after, coloured in zip(placed.chosen.methods, chosen.methods, placed.colourings, strict=True):
        held = {arc.positions: extents for arc, extents in zip(before.arcs, coloured.extents, strict=True)}
        colourings.append(
            shrink([held[arc.positions] for arc in after.arcs], [tails[arc.weight] for arc in after.arcs])
        )
    return _Placed(chosen, {name: tail for name, tail in tails.items() if tail}, tuple(colourings))


def _ahead(placed: _Placed, budget_pages: int) -> _Placed:
    """What is left of the budget goes to the ring, so that copies run further ahead; each method takes what it can."""
    tails = placed.tails
    limit_pages = budget_pages - placed.chosen.resident_pages(tails)
    colourings: list[Colouring] = []
    methods = []
    for method, coloured in zip(placed.chosen.methods, placed.colourings, strict=True):
        best, best_colouring = method, coloured
        # With what fits by load as the upper end; then less and less, until the stays find pages too.
        low, high = 0, sum(tails[arc.weight] for arc in method.arcs)
        while low + high // 16 < high:
            middle = (low + high + 1) // 2
            if peak_load(look_ahead(method, tails, middle), tails) <= limit_pages:
                low = middle
            else:
                high = middle - 1
        ahead_pages = low
        while ahead_pages:
            longer = look_ahead(method, tails, ahead_pages)
            if longer.arcs == method.arcs:
                break
            again = colour(longer, tails, enough_pages=limit_pages)
            if again.page_count <= limit_pages:
                best, best_colouring = longer, again
                break
            ahead_pages = ahead_pages * 3 // 4
        methods.append(best)
        colourings.append(best_colouring)
    return _Placed(replace(placed.chosen, methods=tuple(methods)), tails, tuple(colourings))


def _assemble(placed: _Placed) -> Plan:
    methods = placed.chosen.methods
    laid = [lay_coloured(method, coloured) for method, coloured in zip(methods, placed.colourings, strict=True)]
    return _assembled(placed.chosen, placed.tails, laid, placed.ring_pages)


def _assemble_laps(laps: _Laps) -> Plan:
    return _assembled(laps.chosen, laps.tails, laps.laid, laps.ring_pages)


def _assembled(
    chosen: Streaming, tails: Mapping[str, int], laid: Sequence[Sequence[LaidStay]], ring_pages: int
) -> Plan:
    held = [name for name in chosen.demand.nbytes if name not in tails]
    return assemble(chosen.demand, held, tails, chosen.methods, laid, ring_pages)


def _best_laps(choices: Sequence[Streaming], budget_pages: int, ahead_pages: int) -> _Laps | None:
    """The cheapest choice whose stays can take the ring in laps, so many pages longer than it must be; None where none
    can."""
    # The least that a choice can cost: what does not fit, once a run for each time it streams, and its copies.
    candidates = sorted(
        ((chosen.least_cost_bytes(budget_pages), index, chosen) for index, chosen in enumerate(_by_frequency(choices))),
        key=lambda candidate: candidate[:2],
    )
    best: tuple[int, _Laps] | None = None
    for least_bytes, _, chosen in candidates:
        if best is not None and least_bytes >= best[0]:
            break
        found = _laps_of(chosen, budget_pages, max(1, ahead_pages))
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else replace(best[1], least_bytes=candidates[0][0])


def _cut_elsewhere(laps: _Laps, part: int, parts: int) -> _Laps | None:
    """The same with the laps beginning anew after so many parts of each method's stays."""
    methods = laps.chosen.methods
    laid = [
        lay_in_laps(
            method, laps.tails, laps.ring_pages, laps.chosen.demand.page_bytes, len(method.arcs) * part // parts
        )
        for method in methods
    ]
    whole = tuple(stays for stays in laid if stays is not None)
    return replace(laps, laid=whole) if len(whole) == len(methods) else None


def _laps_of(chosen: Streaming, budget_pages: int, ahead_pages: int) -> tuple[int, _Laps] | None:
    """The best ring for a choice, and its cost: what it moves, and what it lacks of lookahead where runs meet."""
    page_bytes = chosen.demand.page_bytes
    # A longer ring leaves less room for heads, so that tails, and with them the ring, grow: until one holds the other.
    least_pages = 1
    while True:
        tails = chosen.tails_beside(budget_pages - least_pages)
        if tails is None:
            return None
        load_pages = max((reading_load(method, tails) for method in chosen.methods), default=0)
        if load_pages <= least_pages:
            break
        least_pages = load_pages
    best: tuple[int, _Laps] | None = None
    step = max(1, ahead_pages // LAP_TRIALS)
    for ring_pages in range(least_pages + ahead_pages, least_pages + 3 * ahead_pages, step):
        tails = chosen.tails_beside(budget_pages - ring_pages)
        if tails is None:
            break
        streamed = streaming_tails(chosen, tails)
        kept = {name: tail for name, tail in tails.items() if tail}
        lost = max((lost_pages(method, kept, ring_pages) for method in streamed.methods), default=0)
        lacking = max(0, least_pages + ahead_pages - (ring_pages - lost))
        cost = streamed.cost_bytes(kept) + lacking * page_bytes
        if best is not None and cost >= best[0]:
            continue
        laid = [lay_in_laps(method, kept, ring_pages, page_bytes) for method in streamed.methods]
        if all(stays is not None for stays in laid):
            whole = tuple(stays for stays in laid if stays is not None)
            best = cost, _Laps(streamed, kept, whole, ring_pages)
    return best


def _worst(placed: _Placed) -> tuple[str | None, int | None, tuple[str, ...]]:
    """The method and step with the largest load, of equals the first, and the weights that make it."""
    worst: tuple[int, str, int, tuple[str, ...]] | None = None
    for schedule, method in zip(placed.chosen.demand.schedules, placed.chosen.methods, strict=True):
        by_step = loads(method, placed.tails)
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


def _reason(placed: _Placed) -> str:
    page_bytes = placed.chosen.demand.page_bytes
    held_bytes = placed.chosen.resident_pages(placed.tails) * page_bytes
    method, step_index, names = _worst(placed)
    held = f"{held_bytes} bytes for weights held all the time ({len(placed.chosen.held)} of them)"
    if method is None:
        return held
    listed = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{held} and {placed.ring_pages * page_bytes} bytes for step {step_index} of method {method!r}, during which "
        f"{listed} must be in place or on their way (pages of {page_bytes} bytes)"
    )
