"""Turns live ranges and their pages into the records of a plan: blocks, ranges, fills, placements, stays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain

from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES, round_up
from penstock.plan.live_ranges import MethodRanges
from penstock.plan.pages import Demand
from penstock.plan.plan import NO_RANGE, Block, Copy, MethodPlan, Piece, Placement, Plan, Range, Stay
from penstock.plan.ring import Ring, parts
from penstock.schedule import Schedule


def assemble(
    demand: Demand, suffixes: Mapping[str, int], methods: Sequence[MethodRanges], rings: Sequence[Ring]
) -> Plan:
    """Weights in `suffixes` (in pages, none 0) are resident except for their suffix, all others as a whole."""
    return _Assembly(demand, suffixes).plan(methods, rings)


class Memory:
    """Blocks, the ranges that map them, and what fills them, as they are added to a plan."""

    def __init__(self, page_bytes: int, plan: Plan | None = None) -> None:
        self.page_bytes = page_bytes
        self.blocks = [] if plan is None else list(plan.blocks)
        self.ranges = [] if plan is None else list(plan.ranges)
        self.fills = [] if plan is None else list(plan.fills)

    def add_range(self, nbytes: int) -> int:
        """Adds one block of this many bytes, in whole pages, and a range for it."""
        self.ranges.append(Range(round_up(nbytes, self.page_bytes), (len(self.blocks),)))
        self.blocks.append(Block(self.ranges[-1].nbytes, ring=False))
        return len(self.ranges) - 1

    def hold(self, names: Iterable[str], nbytes: Mapping[str, int], unit_bytes: int) -> dict[str, tuple[int, int]]:
        """Puts whole weights one after the other into one range. Returns where each lies, as range and offset."""
        held_at: dict[str, tuple[int, int]] = {}
        end_bytes = 0
        for name in names:
            begin_bytes = round_up(end_bytes, unit_bytes)
            held_at[name] = (len(self.ranges), begin_bytes)
            self.fills.append(Piece(name, 0, nbytes[name], *held_at[name]))
            end_bytes = begin_bytes + nbytes[name]
        if held_at:
            self.add_range(end_bytes)
        return held_at


class _Assembly:
    def __init__(self, demand: Demand, suffixes: Mapping[str, int]) -> None:
        self.demand = demand
        self.suffixes = suffixes
        self.memory = Memory(demand.page_bytes)
        # Where wholly resident weights lie.
        self.held_at: dict[str, tuple[int, int]] = {}
        self.prefix_blocks: dict[str, tuple[int, ...]] = {}
        self.filled_prefixes: set[str] = set()
        # By page of the ring: its block. Pages that no range uses get none.
        self.block_of: list[int] = []

    def plan(self, methods: Sequence[MethodRanges], rings: Sequence[Ring]) -> Plan:
        demand, memory = self.demand, self.memory
        held = [name for name in demand.nbytes if name not in self.suffixes]
        for names in [held] if demand.packs else [[name] for name in held]:
            self.held_at |= memory.hold(names, demand.nbytes, RESIDENT_ALIGNMENT_BYTES)
        for name in self.suffixes:
            prefix_bytes = self._prefix_bytes(name)
            self.prefix_blocks[name] = (len(memory.blocks),) if prefix_bytes else ()
            if prefix_bytes:
                memory.blocks.append(Block(prefix_bytes, ring=False))
        used = bytearray(max((ring.page_count for ring in rings), default=0))
        for first, length, _ in chain.from_iterable(spans for ring in rings for spans in ring.spans):
            used[first : first + length] = b"\1" * length
        self.block_of = [len(memory.blocks) - 1 + number for number in accumulate(used)]
        memory.blocks += [Block(demand.page_bytes, ring=True)] * sum(used)
        planned = tuple(map(self._method, demand.schedules, methods, rings))
        return Plan(demand.page_bytes, tuple(memory.blocks), tuple(memory.ranges), tuple(memory.fills), planned)

    def _prefix_bytes(self, name: str) -> int:
        return (self.demand.pages[name] - self.suffixes[name]) * self.demand.page_bytes

    def _method(self, schedule: Schedule, method: MethodRanges, ring: Ring) -> MethodPlan:
        demand, count, page_bytes = self.demand, method.step_count, self.demand.page_bytes
        first_steps = [schedule.first_step[access.number] for access in schedule.accesses]
        stays: list[Stay] = []
        copies: list[Copy] = []
        range_of: list[int] = []
        for index, (live, spans) in enumerate(zip(method.live_ranges, ring.spans, strict=True)):
            name = live.weight
            nbytes, prefix_bytes = demand.nbytes[name], self._prefix_bytes(name)
            range_index = self._range(name, prefix_bytes, spans)
            range_of.append(range_index)
            stays.append(Stay(name, nbytes - prefix_bytes, live.positions, live.end_step % count))
            last_is_small = demand.last_page_is_small(name)
            for first_page, page_count, blocked_until in parts(spans, page_bytes, last_is_small=last_is_small):
                begin_bytes = prefix_bytes + first_page * page_bytes
                part_bytes = min(page_count * page_bytes, nbytes - begin_bytes)
                piece = Piece(name, begin_bytes, part_bytes, range_index, begin_bytes)
                issue_before = _issue_position(first_steps, blocked_until + 1, count)
                copies.append(Copy(index, piece, issue_before, blocked_until % count))
        return MethodPlan(
            schedule.method,
            self._placements(schedule, stays, range_of),
            tuple(stays),
            _in_order_of_issue(copies, stays, len(schedule.accesses)),
            len(schedule.steps),
        )

    def _range(self, name: str, prefix_bytes: int, spans: Iterable[tuple[int, int, int]]) -> int:
        memory = self.memory
        ring = chain.from_iterable(self.block_of[first : first + length] for first, length, _ in spans)
        nbytes = self.demand.pages[name] * self.demand.page_bytes
        memory.ranges.append(Range(nbytes, (*self.prefix_blocks[name], *ring)))
        # All ranges of a weight map the same prefix: it is filled once, through the first of them.
        if prefix_bytes and name not in self.filled_prefixes:
            memory.fills.append(Piece(name, 0, prefix_bytes, len(memory.ranges) - 1, 0))
            self.filled_prefixes.add(name)
        return len(memory.ranges) - 1

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
                where = (0 if self.memory.ranges else NO_RANGE, 0)
            placements.append(Placement(access.number, access.weight, nbytes, *where, stay))
        return tuple(placements)


def _issue_position(first_steps: Sequence[int], begin_step: int, step_count: int) -> int:
    """The first position fetched for this step or a later one; the number of positions stands for the end of the run.

    What begins with a run is issued at the end of the one before, which may be long before it. If the step is in the
    run before, so is the position, and it comes after the stay's own first access.
    """
    return bisect_left(first_steps, begin_step % step_count) if begin_step else len(first_steps)


def _in_order_of_issue(copies: Iterable[Copy], stays: Sequence[Stay], access_count: int) -> tuple[Copy, ...]:
    """Of copies issued together, those read in this run come before those read in the next."""

    def key(copy: Copy) -> tuple[int, int, int]:
        first = stays[copy.stay].accesses[0]
        reader = first if first >= copy.issue_before else first + access_count
        return copy.issue_before, reader, copy.piece.weight_offset_bytes

    return tuple(sorted(copies, key=key))
