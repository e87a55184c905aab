"""From live ranges and their pages to the records of a plan: blocks, ranges, fills, placements, stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from penstock.plan.demand import Demand
from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES
from penstock.plan.live_ranges import LaidStay, MethodRanges, issue_position
from penstock.plan.plan import NO_RANGE, Block, Copy, MethodPlan, Piece, Placement, Plan, Range, Stay
from penstock.schedule import Schedule


def assemble(
    demand: Demand,
    suffixes: Mapping[str, int],
    methods: Sequence[MethodRanges],
    laid: Sequence[Sequence[LaidStay]],
    ring_pages: int,
) -> Plan:
    """Weights in `suffixes` (pages, none 0) are resident but for their suffix, all others as a whole."""
    held = [name for name in demand.nbytes if name not in suffixes]
    return _Assembly(demand, suffixes).plan(held, methods, laid, ring_pages)


class _Assembly:
    def __init__(self, demand: Demand, suffixes: Mapping[str, int]) -> None:
        self.demand = demand
        self.suffixes = suffixes
        self.blocks: list[Block] = []
        self.ranges: list[Range] = []
        self.fills: list[Piece] = []
        # Where weights that are resident as a whole lie: range and offset.
        self.held_at: dict[str, tuple[int, int]] = {}
        self.prefix_blocks: dict[str, tuple[int, ...]] = {}
        self.filled_prefixes: set[str] = set()

    def plan(
        self,
        held: Sequence[str],
        methods: Sequence[MethodRanges],
        laid: Sequence[Sequence[LaidStay]],
        ring_pages: int,
    ) -> Plan:
        if self.demand.packs:
            self._hold(held)
        else:
            for name in held:
                self._hold([name])
        for name, suffix in self.suffixes.items():
            self._block_for_prefix(name, self.demand.pages[name] - suffix)
        ring_begin = len(self.blocks)
        self.blocks += [Block(self.demand.page_bytes, ring=True)] * ring_pages
        planned = [
            self._method(schedule, method, stays, ring_begin)
            for schedule, method, stays in zip(self.demand.schedules, methods, laid, strict=True)
        ]
        return Plan(
            page_bytes=self.demand.page_bytes,
            blocks=tuple(self.blocks),
            ranges=tuple(self.ranges),
            fills=tuple(self.fills),
            methods=tuple(planned),
        )

    def _hold(self, names: Sequence[str]) -> None:
        """One range, one block, the weights one after the other."""
        end_bytes = 0
        for name in names:
            begin_bytes = -(-end_bytes // RESIDENT_ALIGNMENT_BYTES) * RESIDENT_ALIGNMENT_BYTES
            nbytes = self.demand.nbytes[name]
            self.fills.append(Piece(name, 0, nbytes, len(self.ranges), begin_bytes))
            self.held_at[name] = (len(self.ranges), begin_bytes)
            end_bytes = begin_bytes + nbytes
        if names:
            nbytes = self.demand.held_pages(names) * self.demand.page_bytes
            self.ranges.append(Range(nbytes, (len(self.blocks),)))
            self.blocks.append(Block(nbytes, ring=False))

    def _block_for_prefix(self, name: str, pages: int) -> None:
        self.prefix_blocks[name] = (len(self.blocks),) if pages else ()
        if pages:
            self.blocks.append(Block(pages * self.demand.page_bytes, ring=False))

    def _method(
        self, schedule: Schedule, method: MethodRanges, laid_stays: Sequence[LaidStay], ring_begin: int
    ) -> MethodPlan:
        first_step = schedule.first_step
        first_steps = [first_step[access.number] for access in schedule.accesses]
        count, page_bytes = method.step_count, self.demand.page_bytes
        stays: list[Stay] = []
        copies: list[Copy] = []
        range_of: list[int] = []
        for index, (live, laid) in enumerate(zip(method.live_ranges, laid_stays, strict=True)):
            name = live.weight
            nbytes = self.demand.nbytes[name]
            prefix_bytes = (self.demand.pages[name] - self.suffixes[name]) * page_bytes
            range_index = self._range(name, prefix_bytes, ring_begin, laid)
            range_of.append(range_index)
            stays.append(Stay(name, nbytes - prefix_bytes, live.positions, live.end_step % count))
            for first_page, page_count, begin_step, blocked_until in laid.parts:
                begin_bytes = prefix_bytes + first_page * page_bytes
                part_bytes = min(page_count * page_bytes, nbytes - begin_bytes)
                piece = Piece(name, begin_bytes, part_bytes, range_index, begin_bytes)
                issue_before = issue_position(first_steps, begin_step, count)
                copies.append(Copy(index, piece, issue_before, blocked_until % count))
        return MethodPlan(
            schedule.method,
            self._placements(schedule, stays, range_of),
            tuple(stays),
            in_order_of_issue(copies, stays, len(schedule.accesses)),
            len(schedule.steps),
        )

    def _range(self, name: str, prefix_bytes: int, ring_begin: int, laid: LaidStay) -> int:
        ring = chain.from_iterable(
            range(ring_begin + first, ring_begin + first + length) for first, length in laid.extents
        )
        nbytes = self.demand.pages[name] * self.demand.page_bytes
        self.ranges.append(Range(nbytes, (*self.prefix_blocks[name], *ring)))
        # All ranges of a weight show the same prefix: it is filled once, through the first of them.
        if prefix_bytes and name not in self.filled_prefixes:
            self.fills.append(Piece(name, 0, prefix_bytes, len(self.ranges) - 1, 0))
            self.filled_prefixes.add(name)
        return len(self.ranges) - 1

    def _placements(self, schedule: Schedule, stays: Sequence[Stay], range_of: Sequence[int]) -> tuple[Placement, ...]:
        stay_of = {position: index for index, stay in enumerate(stays) for position in stay.accesses}
        placements: list[Placement] = []
        for position, access in enumerate(schedule.accesses):
            nbytes = self.demand.nbytes.get(access.weight, 0)
            stay = stay_of.get(position)
            if stay is not None:
                where = (range_of[stay], 0)
            elif nbytes:
                where = self.held_at[access.weight]
            else:
                where = (0 if self.ranges else NO_RANGE, 0)
            placements.append(Placement(access.number, access.weight, nbytes, *where, stay))
        return tuple(placements)


def in_order_of_issue(copies: Sequence[Copy], stays: Sequence[Stay], access_count: int) -> tuple[Copy, ...]:
    """Of copies issued together, what is read in this run comes before what is read in the next."""

    def key(copy: Copy) -> tuple[int, int, int]:
        first = stays[copy.stay].accesses[0]
        reader = first if first >= copy.issue_before else first + access_count
        return copy.issue_before, reader, copy.piece.weight_offset_bytes

    return tuple(sorted(copies, key=key))
