"""The check must see what it is there for: sound plans broken in one place each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest

from penstock.plan.check import PlanError, check_plan
from penstock.plan.plan import Copy, Piece, Plan
from penstock.plan.planner import make_plan
from penstock.schedule import Schedule
from tests.plan.test_floor import chain, weights_of

NAMES = [f"w{index}" for index in range(12)]
WEIGHTS = weights_of(small=100, **dict.fromkeys(NAMES, 10 * 4096 - 5))
SCHEDULE = chain(*NAMES[:6], "small", *NAMES[6:])
BUDGET_BYTES = 60 * 4096


@pytest.fixture
def plan() -> Plan:
    made = make_plan([SCHEDULE], WEIGHTS, budget_bytes=BUDGET_BYTES, page_bytes=4096)
    check_plan(made, [SCHEDULE], WEIGHTS, budget_bytes=BUDGET_BYTES)
    assert len(made.methods[0].stays) == 12 and made.ring_bytes and made.fills
    return made


def refused(plan: Plan, message: str, schedule: Schedule = SCHEDULE) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, [schedule], WEIGHTS, budget_bytes=BUDGET_BYTES)


def with_method(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, methods=(dataclasses.replace(plan.methods[0], **changes),))


def with_stay(plan: Plan, index: int, **changes: Any) -> Plan:
    stays = list(plan.methods[0].stays)
    stays[index] = dataclasses.replace(stays[index], **changes)
    return with_method(plan, stays=tuple(stays))


def with_copies(plan: Plan, copies: Iterable[Copy]) -> Plan:
    return with_method(plan, copies=tuple(copies))


def with_piece(plan: Plan, index: int, **changes: Any) -> Plan:
    """The piece of a stay, changed; the stay's own size follows."""
    copies = plan.methods[0].copies
    changed = [
        dataclasses.replace(copy, piece=dataclasses.replace(copy.piece, **changes)) if copy.stay == index else copy
        for copy in copies
    ]
    sizes = sum(copy.piece.nbytes for copy in changed if copy.stay == index)
    return with_stay(with_copies(plan, changed), index, nbytes=sizes)


def every_copy(plan: Plan, change: Callable[[Copy], Copy]) -> Plan:
    return with_copies(plan, map(change, plan.methods[0].copies))


def test_no_copy_may_do_without_its_wait(plan: Plan) -> None:
    """One wait missing may be covered by the copy before it in the queue; not all of them."""
    refused(every_copy(plan, lambda copy: dataclasses.replace(copy, wait_step=None)), "may overwrite")


def test_a_wait_for_an_earlier_step_is_not_enough(plan: Plan) -> None:
    count = plan.methods[0].step_count

    def earlier(copy: Copy) -> Copy:
        assert copy.wait_step is not None
        return dataclasses.replace(copy, wait_step=(copy.wait_step - 1) % count)

    refused(every_copy(plan, earlier), "may overwrite")


def test_a_copy_issued_before_its_pages_were_read(plan: Plan) -> None:
    # Its place in the list follows from the order of issue: the one that is moved comes first.
    copies = plan.methods[0].copies
    moved = next(copy for copy in copies if copy.issue_before == 6)
    rest = (copy for copy in copies if copy is not moved)
    refused(with_copies(plan, (dataclasses.replace(moved, issue_before=0), *rest)), "may overwrite|should lie in")


def test_a_copy_issued_after_its_access(plan: Plan) -> None:
    method = plan.methods[0]
    in_run = [copy for copy in method.copies if method.stays[copy.stay].accesses[0] >= copy.issue_before]
    moved = max(in_run, key=lambda copy: method.stays[copy.stay].accesses[0])
    late = dataclasses.replace(moved, issue_before=len(SCHEDULE.accesses))
    rest = (copy for copy in method.copies if copy is not moved)
    refused(with_copies(plan, (*rest, late)), "should lie in|may overwrite")


def test_copies_out_of_order(plan: Plan) -> None:
    refused(with_copies(plan, reversed(plan.methods[0].copies)), "out of the order of issue")


def test_a_stay_that_a_run_finds_in_the_wrong_pages(plan: Plan) -> None:
    """Two neighbours given the same ring pages: the second copy lands on the first before it is read."""
    ranges = list(plan.ranges)
    in_order = list(dict.fromkeys(copy.piece.range_index for copy in plan.methods[0].copies))

    def ring_of(index: int) -> tuple[int, ...]:
        return tuple(block for block in ranges[index].blocks if plan.blocks[block].ring)

    here, there = next(pair for pair in pairwise(in_order) if len(ring_of(pair[0])) == len(ring_of(pair[1])))
    head = tuple(block for block in ranges[there].blocks if not plan.blocks[block].ring)
    ranges[there] = dataclasses.replace(ranges[there], blocks=head + ring_of(here))
    broken = dataclasses.replace(plan, ranges=tuple(ranges))
    refused(broken, "may overwrite|should lie in|no range maps")


def test_a_piece_too_short_or_elsewhere(plan: Plan) -> None:
    # A stay in one piece, with a head.
    parts = Counter(copy.stay for copy in plan.methods[0].copies)
    copy = next(c for c in plan.methods[0].copies if parts[c.stay] == 1 and c.piece.range_offset_bytes)
    piece, stay = copy.piece, copy.stay
    refused(with_piece(plan, stay, nbytes=piece.nbytes - 1), "bytes of 'w[0-9]+' are placed")
    refused(with_piece(plan, stay, range_offset_bytes=0), "into resident block")
    refused(with_piece(plan, stay, nbytes=piece.nbytes + 1), "beyond its end")
    refused(with_piece(plan, stay, weight="small", weight_offset_bytes=0, nbytes=1), "copies 'small'")
    rest = [other for other in plan.methods[0].copies if other is not copy]
    refused(with_copies(plan, rest), "its copies do not")
    refused(with_stay(with_copies(plan, rest), stay, nbytes=0), "are placed")
    refused(with_stay(plan, stay, nbytes=piece.nbytes + 1), "its copies do not")
    twice = sorted([*plan.methods[0].copies, copy], key=lambda copy: copy.issue_before)
    refused(with_stay(with_copies(plan, twice), stay, nbytes=2 * piece.nbytes), "overlap")


def test_a_head_that_is_not_filled(plan: Plan) -> None:
    for index in range(len(plan.fills)):
        refused(dataclasses.replace(plan, fills=plan.fills[:index] + plan.fills[index + 1 :]), "is not filled")


def test_a_fill_with_other_bytes(plan: Plan) -> None:
    fills = list(plan.fills)
    index = next(index for index, piece in enumerate(fills) if piece.weight == "w3")
    fills[index] = dataclasses.replace(fills[index], weight_offset_bytes=1)
    refused(dataclasses.replace(plan, fills=tuple(fills)), "'w3' is not filled at byte 0")
    over = [*plan.fills, Piece("w3", 0, 1, plan.fills[0].range_index, plan.fills[0].range_offset_bytes)]
    refused(dataclasses.replace(plan, fills=tuple(over)), "overlap in block")


def test_memory_that_does_not_add_up(plan: Plan) -> None:
    refused(dataclasses.replace(plan, blocks=(*plan.blocks, plan.blocks[-1])), "no range maps|of a budget of")
    short = (dataclasses.replace(plan.ranges[0], nbytes=plan.ranges[0].nbytes + 4096), *plan.ranges[1:])
    refused(dataclasses.replace(plan, ranges=short), "range 0 has")
    with pytest.raises(PlanError, match="of a budget of"):
        check_plan(plan, [SCHEDULE], WEIGHTS, budget_bytes=plan.device_bytes - 1)


def test_accesses_that_do_not_agree(plan: Plan) -> None:
    method = plan.methods[0]
    refused(with_method(plan, placements=method.placements[:-1]), "the plan places 12")
    refused(with_stay(plan, 2, last_step=(method.stays[2].last_step + 1) % 13), "its last reader is not step")
    swapped = (method.placements[1], method.placements[0], *method.placements[2:])
    refused(with_method(plan, placements=swapped), "placed elsewhere|accessed is")
    unlisted = dataclasses.replace(method.placements[0], stay=None)
    refused(with_method(plan, placements=(unlisted, *method.placements[1:])), "placed elsewhere")


def test_a_pinned_weight_that_streams(plan: Plan) -> None:
    pinned = dataclasses.replace(SCHEDULE.accesses[0], pinned=True)
    schedule = dataclasses.replace(SCHEDULE, accesses=(pinned, *SCHEDULE.accesses[1:]))
    refused(plan, "is pinned, but streams", schedule)


def test_another_methods_plan(plan: Plan) -> None:
    refused(plan, "methods are not those", dataclasses.replace(SCHEDULE, method="decode"))
