"""An independent check of a plan: the host's calls of several runs, acted out page by page. No code of the planner's.

What the device does is judged by what its order guarantees, not by one lucky timing: kernels run in the order of their
steps, copies in the order of their issue, and between the two there are only the waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.plan.check_memory import (
    Filled,
    PlanError,
    check_fills,
    check_memory,
    check_piece,
    resident_matches,
    spans,
)
from penstock.plan.check_split import check_heads, check_split
from penstock.plan.plan import Copy, MethodPlan, Piece, Plan, Stay
from penstock.schedule import Schedule
from penstock.weight import Weight

__all__ = ["PlanError", "check_plan"]


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
    check_memory(plan)
    check_heads(plan)
    filled = check_fills(plan, weights)
    if [method.method for method in plan.methods] != [schedule.method for schedule in schedules]:
        raise PlanError("the plan's methods are not those of the schedules, in their order")
    for schedule, method in zip(schedules, plan.methods, strict=True):
        _check_records(plan, schedule, method, weights, filled)
        _act_out(plan, schedule, method, runs=4)


def _check_records(
    plan: Plan, schedule: Schedule, method: MethodPlan, weights: Mapping[str, Weight], filled: Filled
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
        check_piece(plan, piece, weights)
        if piece.weight != stay.weight:
            raise PlanError(f"{where}, stay {copy.stay} of {stay.weight!r} copies {piece.weight!r}")
        for block, _, _, _ in spans(plan, piece.range_index, piece.range_offset_bytes, piece.nbytes):
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
        if placed.head_bytes is not None:
            check_split(plan, access, placed, placed.head_bytes, weights[access.weight], filled, where)
            continue
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
        for block, offset, length, ahead in spans(plan, placed.range_index, placed.range_offset_bytes, nbytes):
            if not plan.blocks[block].ring:
                if not resident_matches(filled, block, offset, length, access.weight, ahead):
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
    for block, _, _, ahead in spans(plan, piece.range_index, piece.range_offset_bytes, piece.nbytes):
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
    for block, _, _, ahead in spans(plan, placed.range_index, placed.range_offset_bytes, placed.nbytes):
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
