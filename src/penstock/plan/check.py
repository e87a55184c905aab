"""An independent check of a plan: it acts out the host's calls of two runs of each method. No code of the planner's.

What the device does is judged by what its order guarantees, not by one lucky timing: kernels run in the order of their
steps, and a copy has waited for the step that it names itself, and for no more. In a run a copy is also behind the
copies before it. In a replay it may not be: the copies that a run needs lie in the graph and the others come behind its
launch, so a wait that a copy only inherits may not exist.

Pieces take pages as a whole. A piece in the ring begins with a page, and ends with one or with its weight. All pieces
of a stay lie in one range, where all its accesses read them, and no range maps a page twice. So a page that was last
written by a copy of a stay holds what that stay's accesses read there, and the check needs to know only who wrote it.

Two runs are enough, a cold one and a warm one. Every run issues the same list of copies, each once, and makes the same
accesses. So the last writer and the last reader of each page are the same at the end of every run, and the second run
begins as all later ones do. A later cold run waits for everything before it, and begins as the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.plan.check_experts import check_experts
from penstock.plan.check_memory import Filled, Layout, Pages, check_fills, check_piece, resident_matches, whole
from penstock.plan.check_packed import check_packed
from penstock.plan.check_split import check_prefixes, check_split
from penstock.plan.plan import DIRECT, NO_RANGE, MethodPlan, Piece, Placement, Plan, Stay
from penstock.schedule import Access, Schedule
from penstock.weight import Weight

__all__ = ["PlanError", "check_plan"]


def check_plan(
    plan: Plan,
    schedules: Sequence[Schedule],
    weights: Mapping[str, Weight],
    *,
    budget_bytes: int | None = None,
    packed: Mapping[str, Sequence[int]] | None = None,
    is_staged: bool = False,
) -> None:
    """Raises PlanError, naming the access, stay or piece, if the plan is not safe for these schedules.

    The schedules must be sound: `floor.check_schedules` has seen them. `packed`: by weight that is packed in the file,
    where its blocks begin, and where the last ends. `is_staged`: weights pass through buffers in host memory, and none
    stays there.
    """
    layout = Layout(plan)
    if budget_bytes is not None and plan.device_bytes > budget_bytes:
        raise PlanError(f"the plan takes {plan.device_bytes} bytes of a budget of {budget_bytes}")
    check_prefixes(plan)
    filled = check_fills(plan, layout, weights)
    if [method.method for method in plan.methods] != [schedule.method for schedule in schedules]:
        raise PlanError("the plan's methods are not those of the schedules, in their order")
    for schedule, method in zip(schedules, plan.methods, strict=True):
        pages = _Records(layout, schedule, method, weights, filled).check()
        _Run(schedule, method, pages, len(plan.blocks)).act_out()
    check_packed(plan, weights, packed or {})
    check_experts(plan, schedules, weights, packed or {})
    if is_staged:
        _check_staged(plan)


def _check_staged(plan: Plan) -> None:
    """Buffers are filled in the order of the copies, which is checked for all plans. Kernels read none of them."""
    for method in plan.methods:
        for placed in method.placements:
            if placed.in_place_bytes or placed.has_slots:
                raise PlanError(
                    f"method {method.method!r}, access {placed.number}: {placed.weight!r} is read in host memory, "
                    "where under a cap it does not stay"
                )


@dataclass(frozen=True)
class _RingPages:
    """Where the copies of one method write, by copy and by stay."""

    of_copy: list[list[Pages]]
    of_stay: list[list[Pages]]


class _Records:
    """What does not depend on time: every byte of every access is either filled or in its stay's pieces."""

    def __init__(
        self, layout: Layout, schedule: Schedule, method: MethodPlan, weights: Mapping[str, Weight], filled: Filled
    ) -> None:
        self._layout = layout
        self._schedule = schedule
        self._method = method
        self._weights = weights
        self._filled = filled
        self._where = f"method {schedule.method!r}"
        self._pieces_of: list[list[Piece]] = [[] for _ in method.stays]

    def check(self) -> _RingPages:
        schedule, method, where = self._schedule, self._method, self._where
        if method.step_count != len(schedule.steps):
            raise PlanError(f"{where} has {len(schedule.steps)} steps; the plan says {method.step_count}")
        if len(method.placements) != len(schedule.accesses):
            raise PlanError(f"{where} has {len(schedule.accesses)} accesses; the plan places {len(method.placements)}")
        pages = self._check_copies()
        for index, stay in enumerate(method.stays):
            self._check_stay(index, stay)
        for position, (access, placed) in enumerate(zip(schedule.accesses, method.placements, strict=True)):
            self._check_placement(position, access, placed)
        return pages

    def _check_copies(self) -> _RingPages:
        method, where = self._method, self._where
        pages = _RingPages([], [[] for _ in method.stays])
        issued = 0
        for index, copy in enumerate(method.copies):
            piece = copy.piece
            stay_index = whole(copy.stay, 0, len(method.stays), f"{where}, copy {index}: its stay")
            stay = method.stays[stay_index]
            what = f"{where}, copy {index} of {piece.weight!r}"
            check_piece(piece, self._weights)
            if piece.weight != stay.weight:
                raise PlanError(f"{where}, stay {stay_index} of {stay.weight!r} copies {piece.weight!r}")
            ring, resident = self._layout.stretch(piece.range_index, piece.range_offset_bytes, piece.nbytes)
            if resident:
                raise PlanError(
                    f"{where}, stay {stay_index} of {stay.weight!r} copies into resident block {resident[0][0]}"
                )
            end_bytes = piece.weight_offset_bytes + piece.nbytes
            page_bytes = self._layout.page_bytes
            if piece.range_offset_bytes % page_bytes or (
                (piece.range_offset_bytes + piece.nbytes) % page_bytes
                and end_bytes != self._weights[piece.weight].nbytes
            ):
                raise PlanError(
                    f"{what} takes {piece.nbytes} bytes at {piece.range_offset_bytes} of its range; a piece in the "
                    f"ring begins with a page of {page_bytes} bytes, and ends with one or with its weight"
                )
            whole(copy.issue_before, issued, len(method.placements) + 1, f"{what}, in the order of issue: issue_before")
            issued = copy.issue_before
            if copy.wait_step is not None:
                whole(copy.wait_step, 0, method.step_count, f"{what}: wait_step")
            self._pieces_of[stay_index].append(piece)
            pages.of_copy.append(ring)
            pages.of_stay[stay_index].extend(ring)
        return pages

    def _check_stay(self, index: int, stay: Stay) -> None:
        method, where = self._method, self._where
        if not stay.accesses:
            raise PlanError(f"{where}, stay {index} of {stay.weight!r} is read by no access")
        for position in stay.accesses:
            whole(position, 0, len(method.placements), f"{where}, stay {index} of {stay.weight!r}: its access")
            if method.placements[position].stay != index:
                raise PlanError(f"{where}, stay {index} lists position {position}, which is placed elsewhere")
        if len(set(stay.accesses)) != len(stay.accesses):
            raise PlanError(f"{where}, stay {index} of {stay.weight!r} lists an access twice")
        if not self._pieces_of[index] or sum(piece.nbytes for piece in self._pieces_of[index]) != stay.nbytes:
            raise PlanError(f"{where}, stay {index} of {stay.weight!r} has {stay.nbytes} bytes, its copies do not")
        if stay.last_step != self._last_step(stay):
            raise PlanError(f"{where}, stay {index} of {stay.weight!r}: its last reader is not step {stay.last_step}")

    def _last_step(self, stay: Stay) -> int:
        schedule, count = self._schedule, len(self._schedule.steps)
        last, run, previous = 0, 0, -1
        for position in stay.accesses:
            run += position <= previous
            last = max(last, run * count + schedule.last_step[schedule.accesses[position].number])
            previous = position
        if run > 1:
            raise PlanError(f"{self._where}: a stay of {stay.weight!r} lists accesses {stay.accesses}, over three runs")
        return last % count

    def _check_placement(self, position: int, access: Access, placed: Placement) -> None:
        where = f"{self._where}, position {position}"
        if access.weight not in self._weights:
            raise PlanError(f"{where}: {access.weight!r} is not a weight")
        weight = self._weights[access.weight]
        nbytes = weight.nbytes
        if (placed.number, placed.weight, placed.nbytes) != (access.number, access.weight, nbytes):
            raise PlanError(f"{where}: placed is {placed}, accessed is {access}")
        if access.pinned and placed.stay is not None:
            raise PlanError(f"{where}: {access.weight!r} is pinned, but streams")
        whole(placed.range_index, DIRECT, self._layout.range_count, f"{where}: the range of {access.weight!r}")
        if placed.prefix_bytes is not None:
            check_split(self._layout, access, placed, placed.prefix_bytes, weight, self._filled, self._where)
            return
        if nbytes == 0 or placed.is_direct:
            # We never write there, so there is nothing more to check.
            if placed.stay is not None or (nbytes and access.pinned):
                raise PlanError(f"{where}: {access.weight!r} is direct, but pinned or in a stay")
            if placed.range_offset_bytes != 0:
                raise PlanError(f"{where}: {access.weight!r} is offset by {placed.range_offset_bytes} in no range")
            return
        if placed.range_index == NO_RANGE:
            raise PlanError(f"{where}: {access.weight!r} has {nbytes} bytes, but no range")
        _, spans = self._layout.stretch(placed.range_index, placed.range_offset_bytes, nbytes)
        if placed.range_offset_bytes % self._layout.alignment_bytes:
            raise PlanError(
                f"{where}: {access.weight!r} begins at byte {placed.range_offset_bytes} of its range; kernels need a "
                f"multiple of {self._layout.alignment_bytes}"
            )
        covered = self._streamed_bytes(position, placed) if placed.stay is not None else 0
        for block, offset, length, ahead in spans:
            if not resident_matches(self._filled, block, offset, length, access.weight, ahead):
                raise PlanError(f"{where}: {access.weight!r} is not filled at byte {ahead}")
            covered += length
        if covered != nbytes:
            raise PlanError(f"{where}: {covered} of {nbytes} bytes of {access.weight!r} are placed")

    def _streamed_bytes(self, position: int, placed: Placement) -> int:
        where, name = f"{self._where}, position {position}", placed.weight
        stay = whole(placed.stay, 0, len(self._method.stays), f"{where}: the stay of {name!r}")
        if position not in self._method.stays[stay].accesses:
            raise PlanError(f"{self._where}, stay {stay} does not list position {position}, which reads it")
        reached = 0
        for piece in sorted(self._pieces_of[stay], key=lambda piece: piece.weight_offset_bytes):
            begin = placed.range_offset_bytes + piece.weight_offset_bytes
            if piece.weight_offset_bytes < reached:
                raise PlanError(f"{where}: two pieces of {name!r} overlap")
            reached = piece.weight_offset_bytes + piece.nbytes
            if (piece.weight, piece.range_index, piece.range_offset_bytes) != (name, placed.range_index, begin):
                raise PlanError(f"{where}: a piece of {name!r} is not where it is read")
        return sum(piece.nbytes for piece in self._pieces_of[stay])


class _Run:
    """The runs of one method. Steps count over all runs; an event is known by the step it was recorded after."""

    def __init__(self, schedule: Schedule, method: MethodPlan, pages: _RingPages, block_count: int) -> None:
        self._schedule = schedule
        self._method = method
        self._pages = pages
        self._copy_counts = [0] * len(method.stays)
        for copy in method.copies:
            self._copy_counts[copy.stay] += 1
        self._prologue_counts = [0] * len(method.stays)
        for index in method.prologue:
            self._prologue_counts[method.copies[index].stay] += 1
        self._last_read: list[list[int]] = [[] for _ in schedule.steps]
        for index, stay in enumerate(method.stays):
            self._last_read[stay.last_step].append(index)
        # By block: the stay whose copy wrote it last.
        self._holder: list[int | None] = [None] * block_count
        # By stay: the last kernel that reads it, as far as the host has come; and how many of its copies the host has
        # issued since the stay was read to the end. The core counts in the same way.
        self._read_until = [-2 * len(schedule.steps)] * len(method.stays)
        self._issued = [0] * len(method.stays)

    def act_out(self) -> None:
        for index in self._method.prologue:
            self._copy(index, 0, 0)
        for run in (0, 1):
            self._run(run)
            for stay, (issued, prologue) in enumerate(zip(self._issued, self._prologue_counts, strict=True)):
                # A graph is captured with its prologue in place, and a run may follow any run.
                if issued != prologue:
                    raise PlanError(
                        f"{self._what(stay)}: {prologue} of its copies should be made when a run begins, but the run "
                        f"before makes {issued}"
                    )

    def _run(self, run: int) -> None:
        schedule, copies = self._schedule, self._method.copies
        next_copy = position = 0
        for step in range(len(schedule.steps)):
            while position < len(schedule.accesses):
                access = schedule.accesses[position]
                if schedule.first_step[access.number] != step:
                    break
                while next_copy < len(copies) and copies[next_copy].issue_before <= position:
                    self._copy(next_copy, run, step)
                    next_copy += 1
                self._read(position, run * len(schedule.steps) + schedule.last_step[access.number])
                position += 1
            for stay in self._last_read[step]:
                self._issued[stay] = 0
        for index in range(next_copy, len(copies)):
            self._copy(index, run, len(schedule.steps))

    def _copy(self, index: int, run: int, steps_ended: int) -> None:
        copy = self._method.copies[index]
        waits_for = -1
        if copy.wait_step is not None:
            # At the time of issue that step has ended, in this run or in the last one.
            waits_for = (run - (copy.wait_step >= steps_ended)) * len(self._schedule.steps) + copy.wait_step
        for first, end in self._pages.of_copy[index]:
            # S1, for readers so far. Later readers would find the wrong content, which `_read` checks.
            for holder in set(self._holder[first:end]):
                if holder is not None and self._read_until[holder] > max(waits_for, -1):
                    raise PlanError(
                        f"{self._what(copy.stay)}: copy {index} may overwrite {self._method.stays[holder].weight!r} "
                        f"while step {self._read_until[holder] % len(self._schedule.steps)} reads it (waits for step "
                        f"{copy.wait_step})"
                    )
            self._holder[first:end] = [copy.stay] * (end - first)
        self._issued[copy.stay] += 1
        if self._issued[copy.stay] > self._copy_counts[copy.stay]:
            raise PlanError(f"{self._what(copy.stay)}: copy {index} is issued before the last of it was read")

    def _read(self, position: int, last_step: int) -> None:
        placed = self._method.placements[position]
        stay = placed.stay
        if stay is None:
            return
        # S3
        if self._issued[stay] != self._copy_counts[stay]:
            raise PlanError(
                f"{self._what(stay)}: {self._issued[stay]} of {self._copy_counts[stay]} copies are issued before "
                f"position {position} reads it"
            )
        # S2: the kernel waits for the copy of the stay it is listed in, and for no other.
        for first, end in self._pages.of_stay[stay]:
            held = self._holder[first:end]
            if held.count(stay) != end - first:
                other = next(holder for holder in held if holder != stay)
                raise PlanError(
                    f"{self._what(stay)}: position {position} should find it in blocks {first} to {end - 1}, of which "
                    f"one holds {'nothing' if other is None else f'stay {other} of {self._weight(other)!r}'}"
                )
        self._read_until[stay] = max(self._read_until[stay], last_step)

    def _weight(self, stay: int) -> str:
        return self._method.stays[stay].weight

    def _what(self, stay: int) -> str:
        return f"method {self._schedule.method!r}, stay {stay} of {self._weight(stay)!r}"
