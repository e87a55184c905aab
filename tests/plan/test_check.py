"""The check must see what it is there for: sound plans broken in one place each."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.plan import check
from penstock.plan.candidates import EVEN, Streaming
from penstock.plan.check import PlanError, check_plan
from penstock.plan.menu import Menu
from penstock.plan.plan import Block, Copy, MethodPlan, Piece, Placement, Plan, Range, Stay
from penstock.plan.planner import Planner
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.planning import drafted_with
from tests.plan.test_floor import chain, weights_of

NAMES = [f"w{index}" for index in range(12)]
WEIGHTS = weights_of(small=100, **dict.fromkeys(NAMES, 10 * 4096 - 5))
SCHEDULE = chain(*NAMES[:6], "small", *NAMES[6:])
BUDGET_BYTES = 60 * 4096


@pytest.fixture
def plan() -> Plan:
    menu = Menu((SCHEDULE,), WEIGHTS, 4096)
    drafted = drafted_with(Streaming.of(menu.demand, NAMES), menu, BUDGET_BYTES // 4096, EVEN, ahead_pages=6)
    made = None if drafted is None else drafted.plan()
    assert made is not None
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
    """Nor lean on the copy before it in the queue, which in a replay may be in the graph where this one is not."""
    copies = plan.methods[0].copies
    for index, copy in enumerate(copies):
        without = dataclasses.replace(copy, wait_step=None)
        refused(with_copies(plan, (*copies[:index], without, *copies[index + 1 :])), f"copy {index} may overwrite")


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
    refused(
        with_copies(plan, (dataclasses.replace(moved, issue_before=0), *rest)),
        "may overwrite|should find|is issued before",
    )


def test_a_copy_issued_after_its_access(plan: Plan) -> None:
    method = plan.methods[0]
    in_run = [copy for copy in method.copies if method.stays[copy.stay].accesses[0] >= copy.issue_before]
    moved = max(in_run, key=lambda copy: method.stays[copy.stay].accesses[0])
    late = dataclasses.replace(moved, issue_before=len(SCHEDULE.accesses))
    rest = (copy for copy in method.copies if copy is not moved)
    refused(with_copies(plan, (*rest, late)), "should find it in|may overwrite")


def test_copies_out_of_order(plan: Plan) -> None:
    refused(with_copies(plan, reversed(plan.methods[0].copies)), "in the order of issue")


def test_a_stay_that_a_run_finds_in_the_wrong_pages(plan: Plan) -> None:
    """Two neighbours given the same ring pages: the second copy lands on the first before it is read."""
    ranges = list(plan.ranges)
    in_order = list(dict.fromkeys(copy.piece.range_index for copy in plan.methods[0].copies))

    def ring_of(index: int) -> tuple[int, ...]:
        return tuple(block for block in ranges[index].blocks if plan.blocks[block].ring)

    here, there = next(pair for pair in pairwise(in_order) if len(ring_of(pair[0])) == len(ring_of(pair[1])))
    prefix = tuple(block for block in ranges[there].blocks if not plan.blocks[block].ring)
    ranges[there] = dataclasses.replace(ranges[there], blocks=prefix + ring_of(here))
    broken = dataclasses.replace(plan, ranges=tuple(ranges))
    refused(broken, "may overwrite|should find it in|no range maps")


def test_a_piece_too_short_or_elsewhere(plan: Plan) -> None:
    # A stay in one piece, with a prefix.
    parts = Counter(copy.stay for copy in plan.methods[0].copies)
    copy = next(c for c in plan.methods[0].copies if parts[c.stay] == 1 and c.piece.range_offset_bytes)
    piece, stay = copy.piece, copy.stay
    refused(with_piece(plan, stay, nbytes=piece.nbytes - 1), "ends with one or with its weight")
    refused(with_piece(plan, stay, nbytes=piece.nbytes // 4096 * 4096), "bytes of 'w[0-9]+' are placed")
    refused(with_piece(plan, stay, range_offset_bytes=0), "into resident block")
    refused(with_piece(plan, stay, nbytes=piece.nbytes + 1), "beyond its end")
    refused(with_piece(plan, stay, weight="small", weight_offset_bytes=0, nbytes=1), "copies 'small'")
    rest = [other for other in plan.methods[0].copies if other is not copy]
    refused(with_copies(plan, rest), "its copies do not")
    refused(with_stay(with_copies(plan, rest), stay, nbytes=0), "its copies do not")
    refused(with_stay(plan, stay, nbytes=piece.nbytes + 1), "its copies do not")
    twice = sorted([*plan.methods[0].copies, copy], key=lambda copy: copy.issue_before)
    refused(with_stay(with_copies(plan, twice), stay, nbytes=2 * piece.nbytes), "overlap")


def test_a_prefix_that_is_not_filled(plan: Plan) -> None:
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


P = 4096
A_THEN_B = chain("a", "b")
TWO_STAYS = (Stay("a", P, (0,), 0), Stay("b", P, (1,), 1))
TWO_PLACES = (Placement(0, "a", P, 0, 0, 0), Placement(1, "b", P, 1, 0, 1))
ONE_PAGE = ((Block(P, ring=True),), (Range(P, (0,)), Range(P, (0,))), ())


def test_half_a_page_is_not_a_piece() -> None:
    """A page would hold half of one weight and half of another, and be taken for the one that came last."""
    copies = (
        Copy(0, Piece("a", P // 2, P // 2, 0, P // 2), 1, 0),
        Copy(1, Piece("b", 0, P, 1, 0), 1, 0),
        Copy(0, Piece("a", 0, P // 2, 0, 0), 2, 1),
    )
    plan = Plan(P, *ONE_PAGE, (MethodPlan("forward", TWO_PLACES, TWO_STAYS, copies, 2),))
    with pytest.raises(PlanError, match="copy 0 of 'a' takes 2048 bytes at 2048 of its range; a piece in the ring beg"):
        check_plan(plan, [A_THEN_B], weights_of(a=P, b=P))
    # What ends with its weight has the page to itself.
    short = {"a": P, "b": 100}
    whole = (Copy(1, Piece("b", 0, 100, 1, 0), 1, 0), Copy(0, Piece("a", 0, P, 0, 0), 2, 1))
    places = (TWO_PLACES[0], dataclasses.replace(TWO_PLACES[1], nbytes=100))
    stays = (TWO_STAYS[0], dataclasses.replace(TWO_STAYS[1], nbytes=100))
    check_plan(Plan(P, *ONE_PAGE, (MethodPlan("forward", places, stays, whole, 2),)), [A_THEN_B], weights_of(**short))


def test_a_wait_that_is_only_inherited() -> None:
    """Right in runs, where copies follow one another; in a replay the last copy is issued behind the graph, and the one
    before it, whose wait it leans on, lies in the graph. `tests/runtime/test_plan_mutants.py` replays it."""
    schedule, weights, plan = inherited_wait()
    with pytest.raises(PlanError, match="stay 0 of 'w0': copy 3 may overwrite 'w3' while step 3 reads it"):
        check_plan(plan, [schedule], weights)
    method = plan.methods[0]
    own = (*method.copies[:3], dataclasses.replace(method.copies[3], wait_step=3))
    check_plan(dataclasses.replace(plan, methods=(dataclasses.replace(method, copies=own),)), [schedule], weights)


def inherited_wait() -> tuple[Schedule, dict[str, Weight], Plan]:
    names = [f"w{index}" for index in range(6)]
    ring = Block(P, ring=True)
    stays = tuple(Stay(f"w{index}", P, (index,), index) for index in (0, 3, 4, 5))
    copies = (
        Copy(2, Piece("w4", 0, P, 2, 0), 0, 5),
        Copy(1, Piece("w3", 0, P, 1, 0), 1, 0),
        Copy(3, Piece("w5", 0, P, 3, 0), 5, 4),
        Copy(0, Piece("w0", 0, P, 0, 0), 6, None),
    )
    places = (
        Placement(0, "w0", P, 0, 0, 0),
        Placement(1, "w1", P, 4, 0, None),
        Placement(2, "w2", P, 4, P, None),
        *(Placement(index, f"w{index}", P, index - 2, 0, index - 2) for index in (3, 4, 5)),
    )
    ranges = (*(Range(P, (block,)) for block in (1, 1, 0, 0)), Range(2 * P, (2,)))
    fills = (Piece("w1", 0, P, 4, 0), Piece("w2", 0, P, 4, P))
    method = MethodPlan("forward", places, stays, copies, 6)
    plan = Plan(P, (ring, ring, Block(2 * P, ring=False)), ranges, fills, (method,))
    return chain(*names), dict(weights_of(**dict.fromkeys(names, P))), plan


def test_residents_where_kernels_cannot_load_them() -> None:
    places = (Placement(0, "a", 100, 0, 1, None), Placement(1, "b", 100, 0, 256, None))
    fills = (Piece("a", 0, 100, 0, 1), Piece("b", 0, 100, 0, 256))
    blocks, ranges = (Block(P, ring=False),), (Range(P, (0,)),)
    plan = Plan(P, blocks, ranges, fills, (MethodPlan("forward", places, (), (), 2),))
    with pytest.raises(PlanError, match="'a' begins at byte 1 of its range; kernels need a multiple of 256"):
        check_plan(plan, [A_THEN_B], weights_of(a=100, b=100))


def test_the_check_has_no_code_and_no_number_of_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports plain data and its own parts. So a planner that lays weights too closely is refused."""
    folder = Path(check.__file__).parent
    data = {"penstock.errors", "penstock.schedule", "penstock.weight", "penstock.plan.plan"}
    for file in folder.glob("check*.py"):
        found = {node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)}
        ours = {name for name in found if name is not None and name.startswith("penstock")}
        assert all(name in data or name.startswith("penstock.plan.check_") for name in ours), (file.name, ours)

    # Wherever that number is known by its name, as it would be if somebody changed it.
    for name, module in list(sys.modules.items()):
        if name.startswith("penstock.plan.") and hasattr(module, "RESIDENT_ALIGNMENT_BYTES"):
            monkeypatch.setattr(module, "RESIDENT_ALIGNMENT_BYTES", 8)
    schedule, weights = chain("a", "b"), weights_of(a=1000, b=1000)
    laid = Planner([schedule], weights, page_bytes=4096).plan(4096)
    with pytest.raises(PlanError, match="begins at byte 1000 of its range; kernels need a multiple of 256"):
        check_plan(laid, [schedule], weights)


def test_a_stay_read_between_its_copies(plan: Plan) -> None:
    """A copy behind the first of two readers: the second would find it copied twice, or half."""
    places = (TWO_PLACES[0], TWO_PLACES[1], Placement(2, "a", P, 0, 0, 0))
    stays = (Stay("a", P, (0, 2), 2), TWO_STAYS[1])
    blocks = (Block(P, ring=True), Block(P, ring=True))
    ranges = (Range(P, (0,)), Range(P, (1,)))
    copies = (Copy(1, Piece("b", 0, P, 1, 0), 0, 1), Copy(0, Piece("a", 0, P, 0, 0), 1, 0))
    broken = Plan(P, blocks, ranges, (), (MethodPlan("forward", places, stays, copies, 3),))
    with pytest.raises(PlanError, match="stay 0 of 'a': copy 1 is issued before the last of it was read"):
        check_plan(broken, [chain("a", "b", "a")], weights_of(a=P, b=P))


def fields(plan: Plan) -> Iterator[tuple[str, Callable[[Any], Plan]]]:
    """Every number of a plan, and how to put another in its place."""
    method = plan.methods[0]

    def one(of: tuple[Any, ...], index: int, **changes: Any) -> tuple[Any, ...]:
        return (*of[:index], dataclasses.replace(of[index], **changes), *of[index + 1 :])

    def block(index: int, value: Any) -> Plan:
        return dataclasses.replace(plan, blocks=one(plan.blocks, index, nbytes=value))

    def mapping(name: str, value: Any) -> Plan:
        return dataclasses.replace(plan, ranges=one(plan.ranges, 0, **{name: value if name == "nbytes" else (value,)}))

    def fill(name: str, value: Any) -> Plan:
        return dataclasses.replace(plan, fills=one(plan.fills, 0, **{name: value}))

    def piece(name: str, value: Any) -> Plan:
        changed = dataclasses.replace(method.copies[0].piece, **{name: value})
        return with_copies(plan, one(method.copies, 0, piece=changed))

    def copy(name: str, value: Any) -> Plan:
        return with_copies(plan, one(method.copies, 0, **{name: value}))

    def stay(name: str, value: Any) -> Plan:
        return with_stay(plan, 0, **{name: (value,) if name == "accesses" else value})

    def placement(name: str, value: Any) -> Plan:
        return with_method(plan, placements=one(method.placements, 0, **{name: value}))

    for index in (0, len(plan.blocks) - 1):
        yield f"block {index}", partial(block, index)
    of_piece = ("nbytes", "weight_offset_bytes", "range_index", "range_offset_bytes")
    changes: dict[Callable[[str, Any], Plan], tuple[str, ...]] = {
        mapping: ("nbytes", "blocks"),
        fill: of_piece,
        piece: of_piece,
        copy: ("stay", "issue_before", "wait_step"),
        stay: ("nbytes", "last_step", "accesses"),
        placement: ("number", "nbytes", "range_index", "range_offset_bytes", "stay", "prefix_bytes"),
    }
    for change, names in changes.items():
        for name in names:
            yield f"{change.__name__} {name}", partial(change, name)
    yield "page", lambda value: dataclasses.replace(plan, page_bytes=value)
    yield "step count", lambda value: with_method(plan, step_count=value)


def test_whatever_a_number_is_the_check_says_so_by_its_own_error(plan: Plan) -> None:
    """Negative, far too large, and no number: a PlanError, never an IndexError, KeyError or TypeError."""
    count = 0
    for what, put in fields(plan):
        for value in (-1, -3, 2**62, 2**64, 1.5, "1", None):
            # To wait for nothing is another fault, and to be resident, or not split, is none.
            if value is None and what in ("copy wait_step", "placement prefix_bytes"):
                continue
            with pytest.raises(PlanError):
                check_plan(put(value), [SCHEDULE], WEIGHTS)
                pytest.fail(f"{what} = {value!r} was accepted")
            count += 1
    assert count > 150


def test_names_that_are_no_weights(plan: Plan) -> None:
    copies = plan.methods[0].copies
    refused(dataclasses.replace(plan, fills=(dataclasses.replace(plan.fills[0], weight="x"),)), "'x', which is not")
    unknown = dataclasses.replace(copies[0], piece=dataclasses.replace(copies[0].piece, weight="x"))
    refused(with_copies(plan, (unknown, *copies[1:])), "'x', which is not a weight")
    with pytest.raises(PlanError, match="is not a weight"):
        check_plan(plan, [SCHEDULE], {})


def test_the_check_looks_at_extents_and_not_at_pages() -> None:
    """The same program in pages 64 times as fine: the check reads each list of blocks once, and acts on slices."""

    def calls(page_bytes: int) -> int:
        planner = Planner([SCHEDULE], WEIGHTS, page_bytes=page_bytes)
        plan = planner.plan(planner.floor_bytes)
        count = 0

        def count_calls(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(count_calls)
        try:
            check_plan(plan, [SCHEDULE], WEIGHTS)
        finally:
            sys.setprofile(None)
        return count

    assert calls(64) < 4 * calls(4096)
