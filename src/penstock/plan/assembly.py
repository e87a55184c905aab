"""From arcs and their pages to the records of a plan: blocks, ranges, fills, placements, stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES
from penstock.plan.plan import Block, MethodPlan, Piece, Placement, Plan, Range, Stay
from penstock.plan.residency import Demand
from penstock.plan.ring import Colouring
from penstock.plan.stays import MethodArcs, issue_position
from penstock.schedule import Schedule

# The range of an access without bytes where a plan has no range at all.
NO_RANGE = -1


def assemble(
    demand: Demand,
    held: Sequence[str],
    tails: Mapping[str, int],
    methods: Sequence[MethodArcs],
    colourings: Sequence[Colouring],
) -> Plan:
    """Weights in `held` are resident as a whole, those in `tails` (pages, none 0) but for their tail."""
    return _Assembly(demand, tails).plan(held, methods, colourings)


class _Assembly:
    def __init__(self, demand: Demand, tails: Mapping[str, int]) -> None:
        self.demand = demand
        self.tails = tails
        self.blocks: list[Block] = []
        self.ranges: list[Range] = []
        self.fills: list[Piece] = []
        # Where weights that are resident as a whole lie: range and offset.
        self.held_at: dict[str, tuple[int, int]] = {}
        self.head_blocks: dict[str, tuple[int, ...]] = {}
        self.filled_heads: set[str] = set()

    def plan(self, held: Sequence[str], methods: Sequence[MethodArcs], colourings: Sequence[Colouring]) -> Plan:
        if self.demand.packs:
            self._hold(held)
        else:
            for name in held:
                self._hold([name])
        for name, tail in self.tails.items():
            self._block_for_head(name, self.demand.pages[name] - tail)
        ring_begin = len(self.blocks)
        ring_pages = max((coloured.page_count for coloured in colourings), default=0)
        self.blocks += [Block(self.demand.page_bytes, ring=True)] * ring_pages
        planned = [
            self._method(schedule, method, coloured, ring_begin)
            for schedule, method, coloured in zip(self.demand.schedules, methods, colourings, strict=True)
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

    def _block_for_head(self, name: str, pages: int) -> None:
        self.head_blocks[name] = (len(self.blocks),) if pages else ()
        if pages:
            self.blocks.append(Block(pages * self.demand.page_bytes, ring=False))

    def _method(self, schedule: Schedule, method: MethodArcs, coloured: Colouring, ring_begin: int) -> MethodPlan:
        first_steps = [schedule.first_step[access.number] for access in schedule.accesses]
        pages_of = [_pages(extents) for extents in coloured.extents]
        waits = _wait_steps(method, pages_of, coloured.page_count)
        stays: list[Stay] = []
        for arc, pages, wait_step in zip(method.arcs, pages_of, waits, strict=True):
            range_index = self._range(arc.weight, tuple(ring_begin + page for page in pages))
            head_bytes = (self.demand.pages[arc.weight] - len(pages)) * self.demand.page_bytes
            tail_bytes = self.demand.nbytes[arc.weight] - head_bytes
            stays.append(
                Stay(
                    weight=arc.weight,
                    pieces=(Piece(arc.weight, head_bytes, tail_bytes, range_index, head_bytes),),
                    accesses=arc.positions,
                    issue_before=issue_position(first_steps, arc, method.step_count),
                    wait_step=wait_step,
                    last_step=arc.end_step % method.step_count,
                )
            )
        count = len(schedule.accesses)
        # Of copies issued together, what is read in this run comes before what is read in the next.
        stays.sort(key=lambda stay: (stay.issue_before, stay.accesses[0] + count * (not stay.read_before_end)))
        return MethodPlan(schedule.method, self._placements(schedule, stays), tuple(stays), len(schedule.steps))

    def _range(self, name: str, ring_blocks: tuple[int, ...]) -> int:
        blocks = self.head_blocks[name] + ring_blocks
        self.ranges.append(Range(self.demand.pages[name] * self.demand.page_bytes, blocks))
        head_bytes = (self.demand.pages[name] - len(ring_blocks)) * self.demand.page_bytes
        # All ranges of a weight show the same head: it is filled once, through the first of them.
        if head_bytes and name not in self.filled_heads:
            self.fills.append(Piece(name, 0, head_bytes, len(self.ranges) - 1, 0))
            self.filled_heads.add(name)
        return len(self.ranges) - 1

    def _placements(self, schedule: Schedule, stays: Sequence[Stay]) -> tuple[Placement, ...]:
        stay_of = {position: index for index, stay in enumerate(stays) for position in stay.accesses}
        placements: list[Placement] = []
        for position, access in enumerate(schedule.accesses):
            nbytes = self.demand.nbytes.get(access.weight, 0)
            stay = stay_of.get(position)
            if stay is not None:
                where = (stays[stay].pieces[0].range_index, 0)
            elif nbytes:
                where = self.held_at[access.weight]
            else:
                where = (0 if self.ranges else NO_RANGE, 0)
            placements.append(Placement(access.number, access.weight, nbytes, *where, stay))
        return tuple(placements)


def _pages(extents: Sequence[tuple[int, int]]) -> list[int]:
    return [page for first, length in extents for page in range(first, first + length)]


def _wait_steps(method: MethodArcs, pages_of: Sequence[Sequence[int]], page_count: int) -> list[int]:
    """By arc, the last reader of what its pages held before.

    A stay that has a page to itself finds its own copy of the run before there, and waits for its own last reader.
    """
    count = method.step_count
    waits = [0] * len(method.arcs)
    ended = [0] * page_count
    order = sorted(range(len(method.arcs)), key=lambda index: method.arcs[index].begin_step % count)
    # The first round only leaves the ends; the second finds them all, a run later.
    for run in (0, 1):
        for index in order:
            arc = method.arcs[index]
            waits[index] = max(ended[page] for page in pages_of[index]) % count
            end_step = arc.begin_step % count + arc.end_step - arc.begin_step + run * count
            for page in pages_of[index]:
                ended[page] = end_step
    return waits
