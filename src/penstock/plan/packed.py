"""Packed weights in a plan: which of their bytes stay packed in device memory, and which slots the others pass through
on their way over the link. Everything else in a plan is the same as for weights that are not packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.plan.assembly import Memory
from penstock.plan.floor import RESIDENT_ALIGNMENT_BYTES, round_up
from penstock.plan.plan import Copy, MethodPlan, Piece, Plan, Slots, Store
from penstock.plan.tuning import MOST_SLOTS_BYTES, SLOT_COUNTS, SLOTS_PART_OF_BUDGET

# Bytes of a weight in each packed block. csrc/packed/packed_block.h has the same.
BLOCK_BYTES = 64 * 1024

# By packed weight: where each of its blocks begins, and where the last ends.
Begins = Mapping[str, Sequence[int]]


def packed_bytes(begins: Sequence[int], begin_bytes: int, end_bytes: int) -> int:
    """The packed size of the blocks that hold these bytes of a weight."""
    return begins[-(-end_bytes // BLOCK_BYTES)] - begins[begin_bytes // BLOCK_BYTES]


@dataclass(frozen=True)
class SlotSizes:
    """The slots of a plan, before they have a place."""

    count: int
    nbytes: int
    # Of all slots, in whole pages.
    total_bytes: int


def least_slots_bytes(begins: Begins, page_bytes: int) -> int:
    """Two slots: one is filled while the other is decoded."""
    return round_up(2 * round_up(_largest_block_bytes(begins), RESIDENT_ALIGNMENT_BYTES), page_bytes)


def slot_sizes(begins: Begins, budget_bytes: int, spare_bytes: int, page_bytes: int) -> list[SlotSizes]:
    """Ways to divide the slots' bytes, more and smaller ones first: every block fits into one. Empty: none is packed.

    `spare_bytes`: what the least plan leaves of the budget.
    """
    if not begins:
        return []
    wanted_bytes = min(MOST_SLOTS_BYTES, int(budget_bytes * SLOTS_PART_OF_BUDGET), spare_bytes)
    total_bytes = max(wanted_bytes // page_bytes * page_bytes, least_slots_bytes(begins, page_bytes))
    sizes = [
        SlotSizes(count, total_bytes // count // RESIDENT_ALIGNMENT_BYTES * RESIDENT_ALIGNMENT_BYTES, total_bytes)
        for count in SLOT_COUNTS
    ]
    return [one for one in sizes if one.count == 2 or one.nbytes >= _largest_block_bytes(begins)]


def _largest_block_bytes(begins: Begins) -> int:
    return max((after - begin for blocks in begins.values() for begin, after in pairwise(blocks)), default=0)


def with_packed(plan: Plan, begins: Begins, slots: SlotSizes, room_bytes: int) -> Plan:
    """Adds slots to a plan made as if nothing were packed, and keeps as much of what it copies packed in device memory
    as fits in `room_bytes`."""
    stored = _stored(plan, begins, room_bytes, slots.total_bytes // 2)
    memory = Memory(plan.page_bytes, plan)
    slot_range = memory.add_range(slots.total_bytes)
    stores: list[Store] = []
    held_bytes = 0
    for name, (begin_bytes, end_bytes) in stored.items():
        piece = Piece(name, begin_bytes, end_bytes - begin_bytes, len(memory.ranges), held_bytes)
        stores.append(Store(piece, packed_bytes(begins[name], begin_bytes, end_bytes)))
        held_bytes += stores[-1].packed_bytes
    if stores:
        memory.add_range(held_bytes)
    return replace(
        plan,
        blocks=tuple(memory.blocks),
        ranges=tuple(memory.ranges),
        methods=tuple(
            replace(method, copies=tuple(_copies(method, begins, {name: low for name, (low, _) in stored.items()})))
            for method in plan.methods
        ),
        slots=Slots(slots.count, slots.nbytes, slot_range),
        stores=tuple(stores),
    )


def _streamed(plan: Plan, begins: Begins) -> dict[str, tuple[int, int, int]]:
    """For packed weights that are copied: begin, end, number of stays. All stays of a weight copy the same bytes."""
    found: dict[str, tuple[int, int, int]] = {}
    for method in plan.methods:
        count = Counter(stay.weight for stay in method.stays)
        for copy in method.copies:
            name, begin = copy.piece.weight, copy.piece.weight_offset_bytes
            if name in begins:
                low, high, times = found.get(name, (begin, 0, 0))
                found[name] = (min(low, begin), max(high, begin + copy.piece.nbytes), max(times, count[name]))
    return found


def _stored(plan: Plan, begins: Begins, room_bytes: int, copy_bytes: int) -> dict[str, tuple[int, int]]:
    """What stays packed: weights copied most often first, and of those copied as often the same part of each, so that
    the link has the same to do before every step."""
    streamed = _streamed(plan, begins)
    stored: dict[str, tuple[int, int]] = {}
    # Stores are rounded up to whole pages.
    room_bytes = room_bytes // plan.page_bytes * plan.page_bytes
    for times in sorted({times for _, _, times in streamed.values()}, reverse=True):
        some = {name: (low, high) for name, (low, high, count) in streamed.items() if count == times}
        found = _even_part(some, begins, plan.page_bytes, room_bytes, copy_bytes)
        stored |= found
        room_bytes -= sum(packed_bytes(begins[name], low, high) for name, (low, high) in found.items())
    return stored


def _even_part(
    streamed: Mapping[str, tuple[int, int]], begins: Begins, page_bytes: int, room_bytes: int, copy_bytes: int
) -> dict[str, tuple[int, int]]:
    """What is left for the link goes in copies as large as a slot holds: each copy costs time besides its bytes."""
    pages = {name: -(-(high - low) // page_bytes) for name, (low, high) in streamed.items()}
    total = sum(pages.values())
    grain = {
        name: max(1, copy_bytes * (high - low) // packed_bytes(begins[name], low, high) // page_bytes)
        for name, (low, high) in streamed.items()
    }

    def over_link(sent: int) -> dict[str, int]:
        """Pages of each weight, `sent` in all: the same part of each, as nearly as whole copies allow."""
        found: dict[str, int] = {}
        before = given = 0
        for name, count in pages.items():
            before += count
            # What is not sent here is made up for by the next weight.
            owed = before * sent // total - given
            found[name] = count if owed >= count else max(0, owed // grain[name] * grain[name])
            given += found[name]
        return found

    def parts(sent: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        # The end stays, since it is copied last: the link is then further ahead of what is decoded at once.
        return {
            name: (low + sent[name] * page_bytes, high)
            for name, (low, high) in streamed.items()
            if sent[name] < pages[name]
        }

    def left_bytes(sent: Mapping[str, int]) -> int:
        return room_bytes - sum(packed_bytes(begins[name], low, high) for name, (low, high) in parts(sent).items())

    least, most = 0, total
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if left_bytes(over_link(middle)) >= 0 else (middle + 1, most)
    sent = over_link(least)
    left = left_bytes(sent)
    for name in reversed(sent):
        low, high = streamed[name]
        # Page by page, without computing the whole sum again: there may be thousands of weights.
        while sent[name]:
            at_bytes = low + sent[name] * page_bytes
            kept_bytes = packed_bytes(begins[name], at_bytes, high) if at_bytes < high else 0
            more_bytes = packed_bytes(begins[name], at_bytes - page_bytes, high) - kept_bytes
            if more_bytes > left:
                break
            sent[name] -= 1
            left -= more_bytes
    return parts(sent)


def _copies(method: MethodPlan, begins: Begins, stored_from: Mapping[str, int]) -> Iterable[Copy]:
    for copy in method.copies:
        piece = copy.piece
        if piece.weight not in begins:
            yield copy
            continue
        begin, end = piece.weight_offset_bytes, piece.weight_offset_bytes + piece.nbytes
        border = min(max(begin, stored_from.get(piece.weight, end)), end)
        if begin < border:
            over_link = packed_bytes(begins[piece.weight], begin, border)
            yield replace(copy, piece=replace(piece, nbytes=border - begin), packed_bytes=over_link)
        if border < end:
            at_bytes = piece.range_offset_bytes + border - begin
            rest = Piece(piece.weight, border, end - border, piece.range_index, at_bytes)
            yield replace(copy, piece=rest, packed_bytes=0)
