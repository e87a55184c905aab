"""Choices whose stays take the ring in laps. It is little more than one tail, and copies run ahead as far as it goes.

There are two kinds. All weights of a choice stream, with tails of about equal length; or, where little streams, only
some of them do, with tails so long that few copies are made, each into a slot: few large copies beat many small ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.plan.assembly import assemble
from penstock.plan.candidate_sets import CandidateSets
from penstock.plan.laps import lay_in_laps, lost_pages
from penstock.plan.plan import Plan
from penstock.plan.residency import Streaming, streaming_tails
from penstock.plan.ring import reading_load
from penstock.plan.stays import LaidStay
from penstock.plan.tuning import (
    CONTENT_PART,
    COPY_OVERHEAD_BYTES,
    FAILURES,
    LAP_TRIALS,
    LAYINGS,
    MANY_ACCESSES,
    MORE_PAGES,
    SLOT_COUNT,
    SLOT_TRIALS,
    TRIALS_ARCS,
)


@dataclass(frozen=True)
class Laps:
    """A choice whose stays take the ring in laps."""

    chosen: Streaming
    tails: Mapping[str, int]
    laid: tuple[tuple[LaidStay, ...], ...]
    ring_pages: int
    slot_pages: int
    # What the ring lacks of the lookahead asked for, where one run meets the next.
    lacking_pages: int

    @cached_property
    def cost_bytes(self) -> int:
        """What one warm run of every method moves, and what the copies cost beside it."""
        more_copies = sum(len(stay.parts) - 1 for stays in self.laid for stay in stays)
        return self.chosen.cost_bytes(self.tails) + more_copies * COPY_OVERHEAD_BYTES

    @property
    def slow_bytes(self) -> int:
        """The cost and what is lacking, as if all of it were waited for: what tells rings of one choice apart."""
        return self.cost_bytes + self.lacking_pages * self.chosen.demand.page_bytes

    def plan(self) -> Plan:
        demand = self.chosen.demand
        held = [name for name in demand.nbytes if name not in self.tails]
        return assemble(demand, held, self.tails, self.chosen.methods, self.laid, self.ring_pages)


def best_laps(
    sets: CandidateSets, budget_pages: int, ahead_pages: int, below_cost_bytes: int | None = None
) -> Laps | None:
    """The cheapest choice whose stays can take the ring in laps, so many pages longer than it must be; None where none
    can, or none costs less than that. Small weights stream only where nothing else fits."""

    def hopeless(least_bytes: int) -> bool:
        """Whether there is too little to be gained by looking at a choice that costs so much at the least."""
        limit_bytes = below_cost_bytes if best is None else best.cost_bytes
        if limit_bytes is None:
            return False
        if many:
            return (limit_bytes - least_bytes) * CONTENT_PART <= limit_bytes
        return least_bytes >= limit_bytes

    demand = sets.demand
    many = demand.access_count > MANY_ACCESSES
    best: Laps | None = None
    for small in (False, True):
        for least_bytes, candidate in sets.cheapest_first(budget_pages):
            if hopeless(least_bytes):
                break
            # To work out a candidate takes a while where accesses are many: then only the first is looked at.
            if many and candidate.small is not small:
                continue
            for chosen in [candidate.streaming] if many else candidate.variants:
                if hopeless(chosen.least_cost_bytes(budget_pages)):
                    continue
                for found in (even_laps(chosen, budget_pages, max(1, ahead_pages)), *slots(chosen, budget_pages)):
                    if found is None or (demand.any_small(found.tails) and not small):
                        continue
                    if best is None or found.cost_bytes < best.cost_bytes:
                        best = found
            if many:
                break
        if best is not None:
            break
    if best is not None and below_cost_bytes is not None and best.cost_bytes >= below_cost_bytes:
        return None
    return best


def even_laps(chosen: Streaming, budget_pages: int, ahead_pages: int) -> Laps | None:
    """All weights of the choice stream, tails as equal as they can be."""
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
    asked_pages = least_pages + ahead_pages
    trials = _scaled(LAP_TRIALS, chosen)
    usual = range(asked_pages, asked_pages + 2 * ahead_pages, max(1, ahead_pages // trials))
    best = _best_ring(chosen, budget_pages, usual, asked_pages)
    if best is None and trials == LAP_TRIALS:
        best = _best_ring(chosen, budget_pages, range(usual.stop, usual.stop + MORE_PAGES), asked_pages)
    return best


def _best_ring(chosen: Streaming, budget_pages: int, lengths: range, asked_pages: int) -> Laps | None:
    # (cost, ring, what it lacks, tails): the cost without that of stays in several parts, which only laying tells.
    looked_at: list[tuple[int, int, int, dict[str, int]]] = []
    for ring_pages in lengths:
        tails = chosen.tails_beside(budget_pages - ring_pages)
        if tails is None:
            break
        lost = max((lost_pages(method, tails, ring_pages) for method in chosen.methods), default=0)
        lacking = max(0, asked_pages - (ring_pages - lost))
        cost = chosen.cost_bytes(tails) + lacking * chosen.demand.page_bytes
        looked_at.append((cost, ring_pages, lacking, tails))
    best: Laps | None = None
    looked_at.sort(key=lambda trial: trial[:2])
    for turn, (cost, ring_pages, lacking, tails) in enumerate(looked_at[: _scaled(FAILURES, chosen)]):
        if best is not None and (cost >= best.slow_bytes or turn >= LAYINGS):
            break
        found = _laps(streaming_tails(chosen, tails), tails, ring_pages, 1, lacking)
        if found is not None and (best is None or found.slow_bytes < best.slow_bytes):
            best = found
    return best


def slots(chosen: Streaming, budget_pages: int) -> Iterator[Laps]:
    """Some weights of the choice stream, evenly spread; their tails are of one length and so are the slots of the ring.

    While one slot is read, the next is copied to. A longer slot means fewer copies, each of which costs so many bytes
    beside its own, and a larger ring.
    """
    demand = chosen.demand
    page_bytes = demand.page_bytes
    over_pages = demand.full_pages - budget_pages
    times = max(chosen.stays.values(), default=0)
    if over_pages <= 0 or times > min(chosen.stays.values(), default=0):
        return
    best_pages = math.isqrt(over_pages * COPY_OVERHEAD_BYTES // (page_bytes * SLOT_COUNT))
    shortest = max(1, best_pages // 2, -(-COPY_OVERHEAD_BYTES // page_bytes))
    lengths = range(shortest, min(2 * best_pages + 2, chosen.largest_pages) + 1)
    sizes = sorted(chosen.whole.values())
    costs: list[tuple[int, int]] = []
    for slot_pages in lengths[:: max(1, len(lengths) // 64)]:
        streamed_pages = over_pages + SLOT_COUNT * slot_pages
        copies = -(-streamed_pages // slot_pages)
        if len(sizes) - bisect_left(sizes, slot_pages) < copies:
            continue
        lacking = -copies % SLOT_COUNT * slot_pages * page_bytes
        costs.append((times * (streamed_pages * page_bytes + copies * COPY_OVERHEAD_BYTES) + lacking, slot_pages))
    for _, slot_pages in sorted(costs)[: _scaled(SLOT_TRIALS, chosen)]:
        laps = _slotted(chosen, budget_pages, slot_pages)
        if laps is not None:
            yield laps


def _slotted(chosen: Streaming, budget_pages: int, slot_pages: int) -> Laps | None:
    demand = chosen.demand
    ring_pages = SLOT_COUNT * slot_pages
    long_enough = [name for name, size in chosen.whole.items() if size >= slot_pages]
    if slot_pages <= 2:
        long_enough = [name for name in long_enough if demand.last_page_bytes[name] >= demand.small_copy_bytes]
    count = -(-(demand.full_pages - budget_pages + ring_pages) // slot_pages)
    # What is held shares pages, what streams does not: it may take a little more.
    for wanted in range(count, min(count + 3, len(long_enough) + 1)):
        names = [long_enough[turn * len(long_enough) // wanted] for turn in range(wanted)]
        tails = dict.fromkeys(names, slot_pages)
        spare_pages = budget_pages - ring_pages - chosen.resident_pages(tails)
        if spare_pages < 0:
            continue
        # The last stays keep their whole length, so that every page of every slot is somebody's.
        shorter = min(spare_pages, wanted - SLOT_COUNT) if slot_pages > 1 else 0
        tails |= dict.fromkeys(names[: max(shorter, 0)], slot_pages - 1)
        few = streaming_tails(chosen, tails)
        if any(len(method.arcs) < SLOT_COUNT for method in few.methods):
            return None
        lacking = max(-len(method.arcs) % SLOT_COUNT for method in few.methods) * slot_pages
        return _laps(few, tails, ring_pages, slot_pages, lacking)
    return None


def _scaled(trials: int, chosen: Streaming) -> int:
    return max(1, min(trials, TRIALS_ARCS // max(chosen.stay_count, 1)))


def _laps(
    chosen: Streaming, tails: Mapping[str, int], ring_pages: int, slot_pages: int, lacking_pages: int
) -> Laps | None:
    kept = {name: tail for name, tail in tails.items() if tail}
    laid = _lay(chosen, kept, ring_pages, slot_pages)
    if laid is None:
        return None
    # Shorter tails may leave the end of a slot to nobody.
    if slot_pages > 1 and max(_used_pages(stays) for stays in laid) < ring_pages:
        return None
    return Laps(chosen, kept, laid, ring_pages, slot_pages, lacking_pages)


def _used_pages(stays: Sequence[LaidStay]) -> int:
    longest: dict[int, int] = {}
    for stay in stays:
        for first, length in stay.extents:
            longest[first] = max(longest.get(first, 0), length)
    return sum(longest.values())


def _lay(
    chosen: Streaming, tails: Mapping[str, int], ring_pages: int, slot_pages: int
) -> tuple[tuple[LaidStay, ...], ...] | None:
    laid: list[tuple[LaidStay, ...]] = []
    for method in chosen.methods:
        stays = lay_in_laps(method, tails, ring_pages, chosen.demand, slot_pages=slot_pages)
        if stays is None:
            return None
        laid.append(stays)
    return tuple(laid)
