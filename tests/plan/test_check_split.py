"""The check must see what is wrong with a split weight: a sound plan broken in one place each."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.plan.check import PlanError, check_plan
from penstock.plan.menu import Menu
from penstock.plan.menu_planner import MenuPlanner
from penstock.plan.plan import DIRECT, Piece, Plan, Range
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.test_split import PAGE, ROW, linear, matrices
from tests.runtime.session_harness import chain

NAMES = "abcdefgh"
WEIGHTS = matrices(x=1000, y=1000, **dict.fromkeys(NAMES, 128))
SCHEDULE = linear(chain("x", *NAMES, "y", "x"), ["x", "y"])
HEAD = 512 * ROW


@pytest.fixture
def plan() -> Plan:
    """Prefixes beside a ring."""
    menu = Menu((SCHEDULE,), WEIGHTS, PAGE, split=lambda access: access.linear)
    lowest = MenuPlanner(menu).floor()
    made = menu.finished(lowest.plan, lowest.floor_bytes + 30 * PAGE, {})
    check_plan(made, [SCHEDULE], WEIGHTS, budget_bytes=lowest.floor_bytes + 30 * PAGE)
    assert made.split_weights == ("x", "y") and made.ring_bytes and made.methods[0].placements[0].prefix_bytes == HEAD
    return made


def refused(plan: Plan, message: str, schedule: Schedule = SCHEDULE, weights: dict[str, Weight] | None = None) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, [schedule], weights or WEIGHTS)


def with_placements(plan: Plan, positions: tuple[int, ...], **changes: Any) -> Plan:
    placements = list(plan.methods[0].placements)
    for position in positions:
        placements[position] = dataclasses.replace(placements[position], **changes)
    return dataclasses.replace(plan, methods=(dataclasses.replace(plan.methods[0], placements=tuple(placements)),))


def with_access(position: int, **changes: Any) -> Schedule:
    accesses = list(SCHEDULE.accesses)
    accesses[position] = dataclasses.replace(accesses[position], **changes)
    return dataclasses.replace(SCHEDULE, accesses=tuple(accesses))


X = (0, len(NAMES) + 2)
Y = len(NAMES) + 1


def test_only_a_linear_access_that_is_not_pinned_is_split(plan: Plan) -> None:
    refused(plan, "'y' is split, but not read as a linear weight is", with_access(Y, linear=False))
    refused(plan, "'y' is split, but pinned", with_access(Y, pinned=True))


def test_a_prefix_is_rows_by_sixteen_and_not_all_of_them(plan: Plan) -> None:
    for prefix_bytes in (0, HEAD - ROW, HEAD - 8, HEAD - 8 * ROW, 1000 * ROW, 1008 * ROW, -16 * ROW):
        refused(
            with_placements(plan, X, prefix_bytes=prefix_bytes),
            f"its prefix has {prefix_bytes} of 16000 bytes; needs some",
        )
    check_plan(with_placements(plan, X, prefix_bytes=HEAD - 16 * ROW), [SCHEDULE], WEIGHTS)


def test_a_weight_must_lie_row_by_row(plan: Plan) -> None:
    for shape, order in (((1000, 8), (1, 0)), ((8000,), (0,))):
        other = {**WEIGHTS, "x": Weight("x", "bfloat16", shape, order)}
        refused(plan, "needs rows, one by one", weights=other)


def test_accesses_share_one_prefix(plan: Plan) -> None:
    refused(with_placements(plan, X[1:], prefix_bytes=HEAD - 16 * ROW), "another access has 8192 bytes in range")
    other = plan.methods[0].placements[Y].range_index
    refused(with_placements(plan, X[1:], range_index=other), f"8192 bytes in range {other}; another access has")


def test_a_prefix_lies_at_the_beginning_of_a_range_and_in_no_stay(plan: Plan) -> None:
    for changes in ({"stay": 0}, {"range_index": DIRECT}, {"range_index": -1}):
        refused(with_placements(plan, X, **changes), "needs a range that begins with its prefix, and no stay")
    refused(with_placements(plan, X, range_index=999), "the range of 'x' is 999")
    refused(with_placements(plan, X, range_offset_bytes=256), "needs a range that begins with its prefix")


def test_a_prefix_must_be_filled_to_its_end(plan: Plan) -> None:
    index = next(index for index, piece in enumerate(plan.fills) if piece.weight == "x")

    def with_fill(**changes: Any) -> Plan:
        fills = list(plan.fills)
        fills[index] = dataclasses.replace(fills[index], **changes)
        return dataclasses.replace(plan, fills=tuple(fills))

    refused(with_fill(nbytes=HEAD - 1), "'x' is split, but its prefix is not filled at byte 0")
    refused(with_fill(weight="y"), "'x' is split, but its prefix is not filled")
    refused(with_fill(weight_offset_bytes=ROW), "'x' is split, but its prefix is not filled")
    refused(dataclasses.replace(plan, fills=plan.fills[:index] + plan.fills[index + 1 :]), "its prefix is not filled")
    refused(with_placements(plan, X, prefix_bytes=HEAD + 16 * ROW), "are not all within range")


def test_nobody_else_writes_to_a_prefix(plan: Plan) -> None:
    at = plan.methods[0].placements[0].range_index
    over = Piece("a", 0, ROW, at, HEAD - ROW)
    refused(dataclasses.replace(plan, fills=(*plan.fills, over)), "the fills of 'x' and 'a' overlap")
    method = plan.methods[0]
    copy = dataclasses.replace(method.copies[0], piece=dataclasses.replace(method.copies[0].piece, range_index=at))
    broken = dataclasses.replace(method, copies=(copy, *method.copies[1:]))
    refused(dataclasses.replace(plan, methods=(broken,)), "copies into resident block")


def test_a_prefix_in_the_ring(plan: Plan) -> None:
    at = plan.methods[0].placements[0].range_index
    ring = [index for index, block in enumerate(plan.blocks) if block.ring]
    fills = tuple(piece for piece in plan.fills if piece.weight != "x")
    ranges = list(plan.ranges)
    ranges[at] = Range(4 * PAGE, tuple(ring[:4]))
    # The block that was the prefix's is still mapped somewhere.
    ranges.append(plan.ranges[at])
    shorter = with_placements(plan, X, prefix_bytes=4 * PAGE)
    refused(dataclasses.replace(shorter, ranges=tuple(ranges), fills=fills), "its prefix lies in ring block")
