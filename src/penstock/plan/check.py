"""An independent check of a plan: the host's calls of several runs, acted out page by page. No code of the planner's.

What the device does is judged by what its order guarantees, not by one lucky timing: kernels run in the order of their
steps, copies in the order of their issue, and between the two there are only the waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import PenstockError
from penstock.plan.plan import Copy, MethodPlan, Piece, Plan, Stay
from penstock.schedule import Schedule
from penstock.weight import Weight


class PlanError(PenstockError):
    """A plan breaks one of its own rules."""


@dataclass
class _Page:
    """What lies in one ring page, and who may still be reading it. Resident content is checked on its own."""

    # The byte of the weight that the page begins with; None: never written.
    content: tuple[str, int] | None = None
    # The stay whose copy wrote it.
    stay: int | None = None
    # The last step, counted over all runs, of a kernel that reads the content.
    read_until: int = -1


def check_plan(
    plan: Plan, schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, budget_bytes: int | None = None
) -> None:
    """Raises PlanError, naming the access, stay or piece, if the plan is not safe for these schedules."""
    if budget_bytes is not None and plan.device_bytes > budget_bytes:
        raise PlanError(f"the plan takes {plan.device_bytes} bytes of a budget of {budget_bytes}")
    _check_memory(plan)
    filled = _check_fills(plan, weights)
    if [method.method for method in plan.methods] != [schedule.method for schedule in schedules]:
        raise PlanError("the plan's methods are not those of the schedules, in their order")
    for schedule, method in zip(schedules, plan.methods, strict=True):
        _check_records(plan, schedule, method, weights, filled)
        _act_out(plan, schedule, method, runs=4)


def _check_memory(plan: Plan) -> None:
    mapped: set[int] = set()
    for index, block in enumerate(plan.blocks):
        if block.nbytes <= 0 or block.nbytes % plan.page_bytes:
            raise PlanError(f"block {index} has {block.nbytes} bytes, which is not a number of pages")
        if block.ring and block.nbytes != plan.page_bytes:
            raise PlanError(f"ring block {index} has {block.nbytes} bytes; a page has {plan.page_bytes}")
    for index, one in enumerate(plan.ranges):
        covered = sum(plan.blocks[block].nbytes for block in one.blocks)
        if covered != one.nbytes:
            raise PlanError(f"range {index} has {one.nbytes} bytes, but its blocks have {covered}")
        if len(set(one.blocks)) != len(one.blocks):
            raise PlanError(f"range {index} maps a block twice")
        mapped.update(one.blocks)
    unmapped = set(range(len(plan.blocks))) - mapped
    if unmapped:
        raise PlanError(f"blocks that no range maps: {sorted(unmapped)[:8]}")


def _spans(plan: Plan, range_index: int, offset_bytes: int, nbytes: int) -> list[tuple[int, int, int, int]]:
    """(block, offset in the block, length, offset from the start asked for) of a stretch of a range."""
    spans: list[tuple[int, int, int, int]] = []
    begin = 0
    for block in plan.ranges[range_index].blocks:
        end = begin + plan.blocks[block].nbytes
        low, high = max(begin, offset_bytes), min(end, offset_bytes + nbytes)
        if low < high:
            spans.append((block, low - begin, high - low, low - offset_bytes))
        begin = end
    if sum(length for _, _, length, _ in spans) != nbytes:
        raise PlanError(f"{nbytes} bytes at {offset_bytes} are not all within range {range_index}")
    return spans


def _check_piece(plan: Plan, piece: Piece, weights: Mapping[str, Weight]) -> None:
    if piece.nbytes <= 0 or piece.weight_offset_bytes < 0:
        raise PlanError(f"a piece of {piece.weight!r} has {piece.nbytes} bytes at {piece.weight_offset_bytes}")
    if piece.weight_offset_bytes + piece.nbytes > weights[piece.weight].nbytes:
        raise PlanError(f"a piece of {piece.weight!r} goes beyond its end")


# Resident bytes by block: stretches (offset in the block, length, weight, offset in the weight), in their order.
_Filled = dict[int, list[tuple[int, int, str, int]]]


def _check_fills(plan: Plan, weights: Mapping[str, Weight]) -> _Filled:
    filled: _Filled = {}
    for piece in plan.fills:
        _check_piece(plan, piece, weights)
        for block, offset, length, ahead in _spans(plan, piece.range_index, piece.range_offset_bytes, piece.nbytes):
            if plan.blocks[block].ring:
                raise PlanError(f"the fill of {piece.weight!r} writes to ring block {block}")
            filled.setdefault(block, []).append((offset, length, piece.weight, piece.weight_offset_bytes + ahead))
    for block, stretches in filled.items():
        stretches.sort()
        for (offset, length, name, _), (after, _, other, _) in pairwise(stretches):
            if offset + length > after:
                raise PlanError(f"the fills of {name!r} and {other!r} overlap in block {block}")
    return filled


def _resident_matches(filled: _Filled, block: int, offset: int, length: int, name: str, weight_offset: int) -> bool:
    stretches = filled.get(block, [])
    # Stretches do not overlap: the last one that begins at or before the offset is the only one that can hold it.
    index = bisect_right(stretches, offset, key=lambda stretch: stretch[0]) - 1
    if index < 0:
        return False
    begin, size, filled_name, filled_offset = stretches[index]
    return offset + length <= begin + size and filled_name == name and filled_offset + offset - begin == weight_offset


def _check_records(
    plan: Plan, schedule: Schedule, method: MethodPlan, weights: Mapping[str, Weight], filled: _Filled
) -> None:
    """What does not depend on time: every byte of every access is either filled or in its stay's pieces."""
    where = f"method {schedule.method!r}"
    if method.step_count != len(schedule.steps):
        raise PlanError(f"{where} has {len(schedule.steps)} steps; the plan says {method.step_count}")
    if len(method.placements) != len(schedule.accesses):
        raise PlanError(f"{where} has {len(schedule.accesses)} accesses; the plan places {len(method.placements)}")
    pieces_of: list[list[Piece]] = [[] for _ in method.stays]
    for index, copy in enumerate(method.copies):
        piece, stay = copy.piece, method.stays[copy.stay]
        pieces_of[copy.stay].append(piece)
        _check_piece(plan, piece, weights)
        if piece.weight != stay.weight:
            raise PlanError(f"{where}, stay {copy.stay} of {stay.weight!r} copies {piece.weight!r}")
        for block, _, _, _ in _spans(plan, piece.range_index, piece.range_offset_bytes, piece.nbytes):
            if not plan.blocks[block].ring:
                raise PlanError(f"{where}, stay {copy.stay} of {stay.weight!r} copies into resident block {block}")
        if not 0 <= copy.issue_before <= len(schedule.accesses):
            raise PlanError(f"{where}, copy {index} of {stay.weight!r} is issued before {copy.issue_before}")
        if index and method.copies[index - 1].issue_before > copy.issue_before:
            raise PlanError(f"{where}, copy {index} of {stay.weight!r} is listed out of the order of issue")
    for index, stay in enumerate(method.stays):
        if sum(piece.nbytes for piece in pieces_of[index]) != stay.nbytes:
            raise PlanError(f"{where}, stay {index} of {stay.weight!r} has {stay.nbytes} bytes, its copies do not")
        if stay.last_step != _last_step(schedule, stay):
            raise PlanError(f"{where}, stay {index} of {stay.weight!r}: its last reader is not step {stay.last_step}")
        for position in stay.accesses:
            if method.placements[position].stay != index:
                raise PlanError(f"{where}, stay {index} lists position {position}, which is placed elsewhere")
    for position, (access, placed) in enumerate(zip(schedule.accesses, method.placements, strict=True)):
        nbytes = weights[access.weight].nbytes
        if (placed.number, placed.weight, placed.nbytes) != (access.number, access.weight, nbytes):
            raise PlanError(f"{where}, position {position}: placed is {placed}, accessed is {access}")
        if access.pinned and placed.stay is not None:
            raise PlanError(f"{where}, position {position}: {access.weight!r} is pinned, but streams")
        if nbytes == 0:
            if placed.stay is not None or not -1 <= placed.range_index < len(plan.ranges):
                raise PlanError(f"{where}, position {position}: {access.weight!r} has no bytes, but is {placed}")
            continue
        if placed.is_direct:
            # Host memory that nothing of ours writes: there is no more to it.
            if placed.stay is not None or access.pinned:
                raise PlanError(f"{where}, position {position}: {access.weight!r} is direct, but pinned or in a stay")
            continue
        stay_pieces: tuple[Piece, ...] = ()
        if placed.stay is not None:
            if position not in method.stays[placed.stay].accesses:
                raise PlanError(f"{where}, stay {placed.stay} does not list position {position}, which reads it")
            stay_pieces = tuple(pieces_of[placed.stay])
        covered = 0
        reached = 0
        for piece in sorted(stay_pieces, key=lambda piece: piece.weight_offset_bytes):
            begin = placed.range_offset_bytes + piece.weight_offset_bytes
            if piece.weight_offset_bytes < reached:
                raise PlanError(f"{where}, position {position}: two pieces of {access.weight!r} overlap")
            reached = piece.weight_offset_bytes + piece.nbytes
            if (piece.range_index, piece.range_offset_bytes) != (placed.range_index, begin):
                raise PlanError(f"{where}, position {position}: a piece of {access.weight!r} is not where it is read")
            covered += piece.nbytes
        for block, offset, length, ahead in _spans(plan, placed.range_index, placed.range_offset_bytes, nbytes):
            if not plan.blocks[block].ring:
                if not _resident_matches(filled, block, offset, length, access.weight, ahead):
                    raise PlanError(f"{where}, position {position}: {access.weight!r} is not filled at byte {ahead}")
                covered += length
        if covered != nbytes:
            raise PlanError(
                f"{where}, position {position}: {covered} of {nbytes} bytes of {access.weight!r} are placed"
            )


def _last_step(schedule: Schedule, stay: Stay) -> int:
    last, run, previous = 0, 0, -1
    for position in stay.accesses:
        run += position <= previous
        last = max(last, run * len(schedule.steps) + schedule.last_step[schedule.accesses[position].number])
        previous = position
    return last % len(schedule.steps)


def _act_out(plan: Plan, schedule: Schedule, method: MethodPlan, *, runs: int) -> None:
    """A cold run and warm ones. Steps count over all runs; an event is known by the step it was recorded after."""
    ring = {index: _Page() for index, block in enumerate(plan.blocks) if block.ring}
    issue_at: dict[int, list[int]] = {}
    for index, planned in enumerate(method.copies):
        issue_at.setdefault(planned.issue_before, []).append(index)
    fetched_at: dict[int, list[int]] = {}
    for position, access in enumerate(schedule.accesses):
        fetched_at.setdefault(schedule.first_step[access.number], []).append(position)
    end = len(schedule.accesses)
    recorded: dict[int, int] = {}
    # Copies run in the order of issue: what one has waited for, those behind it have waited for as well.
    copies_wait_for = -1

    def copy(index: int) -> None:
        nonlocal copies_wait_for
        planned = method.copies[index]
        if planned.wait_step is not None:
            copies_wait_for = max(copies_wait_for, recorded.get(planned.wait_step, -1))
        _write(plan, schedule, ring, planned, copies_wait_for)

    for run in range(runs):
        if run == 0:
            for index in method.entering:
                copy(index)
        for step in range(len(schedule.steps)):
            for position in fetched_at.get(step, ()):
                for index in issue_at.get(position, ()):
                    copy(index)
                _read(plan, schedule, method, ring, position, run * len(schedule.steps))
            recorded[step] = run * len(schedule.steps) + step
        for index in issue_at.get(end, ()):
            copy(index)


def _write(plan: Plan, schedule: Schedule, ring: dict[int, _Page], copy: Copy, waited_for: int) -> None:
    piece = copy.piece
    for block, _, _, ahead in _spans(plan, piece.range_index, piece.range_offset_bytes, piece.nbytes):
        page = ring[block]
        # S1. Readers that come only later find the wrong content then.
        if page.read_until > waited_for:
            raise PlanError(
                f"method {schedule.method!r}, stay {copy.stay} of {piece.weight!r}: its copy may overwrite "
                f"{page.content} while step {page.read_until % len(schedule.steps)} reads it "
                f"(waits for step {copy.wait_step})"
            )
        ring[block] = _Page((piece.weight, piece.weight_offset_bytes + ahead), copy.stay)


def _read(
    plan: Plan, schedule: Schedule, method: MethodPlan, ring: dict[int, _Page], position: int, steps_before: int
) -> None:
    placed = method.placements[position]
    if placed.stay is None:
        return
    last = steps_before + schedule.last_step[placed.number]
    for block, _, _, ahead in _spans(plan, placed.range_index, placed.range_offset_bytes, placed.nbytes):
        if not plan.blocks[block].ring:
            continue
        page = ring[block]
        # S2: the kernel waits for the copy of the stay it is listed in, and for no other.
        if page.content != (placed.weight, ahead) or page.stay != placed.stay:
            raise PlanError(
                f"method {schedule.method!r}, position {position}: byte {ahead} of {placed.weight!r} should lie in "
                f"block {block}, which holds {page.content} of stay {page.stay} instead of stay {placed.stay}"
            )
        page.read_until = max(page.read_until, last)
