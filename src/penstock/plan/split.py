"""Weights that are read on both sides by one launch, put into a plan that reads them in host memory alone.

Whatever else the plan does stays as it is: prefixes get blocks and ranges of their own, which nobody else knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.plan.plan import Block, MethodPlan, Piece, Placement, Plan, Range
from penstock.plan.prefixes import Prefixes
from penstock.schedule import Access, Schedule
from penstock.weight import Weight

IsSplit = Callable[[Access], bool]


def with_prefixes(
    plan: Plan,
    schedules: Sequence[Schedule],
    weights: Mapping[str, Weight],
    prefixes: Prefixes,
    is_split: IsSplit,
    alignment_bytes: int,
) -> Plan:
    """The plan with these prefixes, and with weights that are held whole though it reads them in place."""
    blocks, ranges, fills = list(plan.blocks), list(plan.ranges), list(plan.fills)

    def add_range(nbytes: int) -> None:
        pages_bytes = -(-nbytes // plan.page_bytes) * plan.page_bytes
        ranges.append(Range(pages_bytes, (len(blocks),)))
        blocks.append(Block(pages_bytes, ring=False))

    # Range and offset.
    whole_at: dict[str, tuple[int, int]] = {}
    end_bytes = 0
    for name in prefixes.whole:
        begin_bytes = -(-end_bytes // alignment_bytes) * alignment_bytes
        whole_at[name] = (len(ranges), begin_bytes)
        fills.append(Piece(name, 0, weights[name].nbytes, *whole_at[name]))
        end_bytes = begin_bytes + weights[name].nbytes
    if prefixes.whole:
        add_range(end_bytes)
    prefix_at: dict[str, int] = {}
    for name, nbytes in prefixes.prefix_bytes.items():
        prefix_at[name] = len(ranges)
        fills.append(Piece(name, 0, nbytes, prefix_at[name], 0))
        add_range(nbytes)

    def placed(access: Access, found: Placement) -> Placement:
        name = found.weight
        if found.is_direct and name in whole_at:
            range_index, offset_bytes = whole_at[name]
            # Experts that lie there as a whole are found there, and need no slots.
            return replace(found, range_index=range_index, range_offset_bytes=offset_bytes, bank=None)
        if found.is_direct and name in prefix_at and is_split(access):
            return replace(found, range_index=prefix_at[name], prefix_bytes=prefixes.prefix_bytes[name])
        return found

    def method(schedule: Schedule, found: MethodPlan) -> MethodPlan:
        return replace(found, placements=tuple(map(placed, schedule.accesses, found.placements)))

    methods = tuple(map(method, schedules, plan.methods))
    return replace(plan, blocks=tuple(blocks), ranges=tuple(ranges), fills=tuple(fills), methods=methods)
