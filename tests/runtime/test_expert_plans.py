"""Plans with experts in slots and one thing wrong: refused by the check, and by the core where it can see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.plan.check import PlanError, check_plan
from penstock.plan.plan import DIRECT, NO_SLOTS, Block, MethodPlan, Piece, Placement, Plan, Range, Slots, Store
from penstock.runtime.records import plan_numbers
from penstock.schedule import Schedule
from tests.runtime.expert_harness import EXPERTS, ROW_BYTES, ExpertHarness, ExpertModel, layers
from tests.runtime.session_harness import PAGE

Change = Callable[[Plan], Plan]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExpertModel:
    return layers(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def plan(model: ExpertModel) -> Plan:
    return model.with_slots(5, 3)


def bank(number: int = 0, **changes: Any) -> Change:
    def change(plan: Plan) -> Plan:
        banks = list(plan.banks)
        banks[number] = replace(banks[number], **changes)
        return replace(plan, banks=tuple(banks))

    return change


def member(number: int, index: int = 0, **changes: Any) -> Change:
    def change(plan: Plan) -> Plan:
        members = list(plan.banks[number].members)
        members[index] = replace(members[index], **changes)
        return bank(number, members=tuple(members))(plan)

    return change


def method(number: int, change: Callable[[MethodPlan], MethodPlan]) -> Change:
    def changed(plan: Plan) -> Plan:
        methods = list(plan.methods)
        methods[number] = change(methods[number])
        return replace(plan, methods=tuple(methods))

    return changed


def placement(number: int, position: int, **changes: Any) -> Change:
    """Of the first method: w0 gate0 v0 down0 w1 gate1 v1 down1. Of the second: gate1 down1 v1 down1 gate1 w1 v0 ..."""

    def change(found: MethodPlan) -> MethodPlan:
        placed = list(found.placements)
        placed[position] = replace(placed[position], **changes)
        return replace(found, placements=tuple(placed))

    return method(number, change)


def more_fills(piece: Piece) -> Change:
    return lambda plan: replace(plan, fills=(*plan.fills, piece))


def mapped_again(plan: Plan) -> Plan:
    area = plan.ranges[plan.banks[0].range_index]
    return replace(plan, ranges=(*plan.ranges, area))


def copied_into(plan: Plan) -> Plan:
    """A copy of some weight goes to the table."""

    def change(found: MethodPlan) -> MethodPlan:
        copy = found.copies[0]
        piece = replace(copy.piece, range_index=plan.banks[0].range_index, range_offset_bytes=0)
        return replace(found, copies=(replace(copy, piece=piece), *found.copies[1:]))

    return method(0, change)(plan)


def read_there(plan: Plan) -> Plan:
    return placement(0, 0, range_index=plan.banks[0].range_index, range_offset_bytes=0, stay=None)(plan)


def in_the_ring(plan: Plan) -> Plan:
    """The range of the bank is made of a ring's pages."""
    ring = next(index for index, block in enumerate(plan.blocks) if block.ring)
    area = plan.ranges[plan.banks[0].range_index]
    last = len(plan.ranges)
    count = area.nbytes // PAGE
    pages = tuple(range(len(plan.blocks), len(plan.blocks) + count - 1))
    moved = replace(
        plan,
        blocks=(*plan.blocks, *[Block(PAGE, ring=False)] * (count - 1)),
        ranges=(*plan.ranges, Range(area.nbytes, (*pages, ring))),
    )
    banks = tuple(
        replace(one, range_index=last, members=tuple(replace(m, range_index=last) for m in one.members))
        for one in plan.banks
    )
    unused = replace(moved.ranges[plan.banks[0].range_index])
    assert unused.nbytes == area.nbytes
    return replace(moved, banks=banks)


def packed_slots_there(plan: Plan) -> Plan:
    return replace(plan, slots=Slots(2, 256, plan.banks[0].range_index))


def stored_there(plan: Plan) -> Plan:
    return replace(plan, stores=(Store(Piece("w0", 0, 256, plan.banks[0].range_index, 0), 256),))


def swapped_members(plan: Plan) -> Plan:
    """Each bank has a weight of the other: rows of one are taken by one index, and chosen by another."""
    one, other = plan.banks
    crossed = (
        replace(
            one,
            members=(one.members[0], replace(other.members[1], range_offset_bytes=one.members[1].range_offset_bytes)),
        ),
        replace(
            other,
            members=(other.members[0], replace(one.members[1], range_offset_bytes=other.members[1].range_offset_bytes)),
        ),
    )
    moved = replace(plan, banks=crossed)
    for number, positions in ((0, (3, 7)), (1, (1, 3, 7))):
        for position in positions:
            placed = moved.methods[number].placements[position]
            assert placed.weight.startswith("down") and placed.bank is not None
            moved = placement(number, position, bank=1 - placed.bank)(moved)
    return moved


TABLE_BYTES = 64 + 16 + 4 * (5 * EXPERTS + 5) + 256 * 4
# What is done, what the check says, and what the core says; None: which does not see it.
CASES: dict[str, tuple[Change, str, str | None]] = {
    "slots that overlap slots": (
        lambda plan: member(0, 1, range_offset_bytes=plan.banks[0].members[0].range_offset_bytes + 256)(plan),
        "two rooms of experts overlap",
        "two rooms overlap",
    ),
    "slots that overlap those of another bank": (
        lambda plan: member(1, 0, range_offset_bytes=plan.banks[0].members[1].range_offset_bytes)(plan),
        "two rooms of experts overlap",
        "two rooms overlap",
    ),
    "slots in a table": (member(0, range_offset_bytes=0), "two rooms of experts overlap", "two rooms overlap"),
    "a table in slots": (
        lambda plan: bank(1, range_offset_bytes=plan.banks[0].members[0].range_offset_bytes)(plan),
        "two rooms of experts overlap",
        "two rooms overlap",
    ),
    "one slot more than there is room for": (bank(0, slots=6), "two rooms of experts overlap", "two rooms overlap"),
    "a table that ends behind its range": (
        lambda plan: bank(0, range_offset_bytes=plan.ranges[-1].nbytes - TABLE_BYTES // 256 * 256)(plan),
        "its table: the offset",
        "needs to be in",
    ),
    "slots that end behind their range": (
        lambda plan: member(1, 1, range_offset_bytes=plan.ranges[-1].nbytes - 3 * ROW_BYTES[1] + 256)(plan),
        "the slots of 'down1': the offset",
        "needs to be in",
    ),
    "an offset below nothing": (bank(0, range_offset_bytes=-256), "its table: the offset", "needs to be in"),
    "a range that is none": (bank(0, range_index=99), "its table: the range", "needs to be in"),
    "slots in a range that is none": (member(0, range_index=-1), "the slots of 'gate0': the range", "needs to be in"),
    "a table at no multiple": (bank(0, range_offset_bytes=16), "needs a multiple of 256", "needs a multiple of 256"),
    "slots at no multiple": (
        lambda plan: member(1, 1, range_offset_bytes=plan.banks[1].members[1].range_offset_bytes + 16)(plan),
        "needs a multiple of 256",
        "needs a multiple of 256",
    ),
    "no slot": (bank(0, slots=0), "the number of slots", "needs to be in"),
    "more slots than experts": (bank(0, slots=EXPERTS + 1), "the number of slots", "needs to be in"),
    "no expert": (bank(0, experts=0), "the number of experts", "needs to be in"),
    "more experts than a table has": (bank(0, experts=4097), "the number of experts", "needs to be in"),
    "half of the experts": (bank(0, experts=EXPERTS // 2), "is no weight of 8 experts", None),
    "experts that do not divide the weight": (
        bank(0, experts=EXPERTS - 1),
        "is no weight of 15 experts",
        "which are not 15 experts",
    ),
    "experts of other bytes": (member(0, row_bytes=ROW_BYTES[0] - 16), "an expert of 'gate0' has 1040 bytes", None),
    "no weight": (bank(0, members=()), "has no weight, or one twice", "which has others"),
    "a weight that is missing": (
        lambda plan: bank(0, members=plan.banks[0].members[:1])(plan),
        "is given to bank 0, which has other weights",
        "which has others",
    ),
    "a weight twice": (
        lambda plan: bank(0, members=(plan.banks[0].members[0],) * 2)(plan),
        "has no weight, or one twice",
        "two rooms overlap|which has others",
    ),
    "a weight that is no experts": (member(0, weight="w0"), "'w0' is no weight of 16 experts", "which has others"),
    "a weight that is none at all": (member(0, weight="nothing"), "'nothing' is no weight", None),
    "a range that is filled": (
        lambda plan: more_fills(Piece("w0", 0, 64, plan.banks[0].range_index, 0))(plan),
        "is for experts, and others lie there",
        "a fill goes to range",
    ),
    "a range that is mapped twice": (mapped_again, "is mapped into two ranges", "and another range maps it"),
    "a range that is copied into": (copied_into, "copies into resident block", "a copy goes to range"),
    "a range that an access reads": (read_there, "is not filled|others lie there", "an access goes to range"),
    "a page of the ring": (in_the_ring, "in a block of the ring|is mapped into two ranges", "another range maps it"),
    "slots of packed weights there": (packed_slots_there, "packed|others lie there", "two rooms overlap"),
    "packed weights that stay there": (stored_there, "packed|others lie there", "two rooms overlap"),
    "nobody chooses": (placement(0, 1, chooses=False), "slots that were not chosen for it", "nobody has chosen for it"),
    "the second chooses as well": (placement(0, 3, chooses=True), "chooses before 'down0' was read", "before all have"),
    "the second in the place of the first": (
        lambda plan: placement(0, 3, chooses=True)(placement(0, 1, chooses=False)(plan)),
        "slots that were not chosen for it",
        "nobody has chosen for it",
    ),
    "one that is read without slots": (
        placement(0, 3, bank=NO_SLOTS),
        "was chosen for, and 'down0' was not read",
        "not all members are read",
    ),
    "one that is read without slots before the next choice": (
        placement(1, 1, bank=NO_SLOTS),
        "chooses before 'down1' was read",
        "chooses before all have read",
    ),
    "one that says nothing of experts": (
        placement(0, 3, bank=None),
        "reads experts in host memory, and its placement does not say so",
        "not all members are read",
    ),
    "the next index does not choose": (
        placement(1, 3, chooses=False),
        "slots that were not chosen for it",
        "nobody has chosen for it",
    ),
    "the bank of another": (placement(0, 1, bank=1), "is given to bank 1, which has other weights", "which has others"),
    "a bank that is none": (placement(0, 1, bank=2), "its bank", "needs to be in"),
    "a bank below none": (placement(0, 1, bank=-3, chooses=False), "its bank", "needs to be in"),
    "a choice for no slots": (
        lambda plan: placement(0, 3, bank=NO_SLOTS)(placement(0, 1, bank=NO_SLOTS)(plan)),
        "chooses for slots that there are none of",
        "needs to be in",
    ),
    "a choice of a weight that is no experts": (placement(0, 0, chooses=True), "does not say so", "needs to be in"),
    "slots for a weight that is no experts": (
        placement(0, 0, bank=NO_SLOTS),
        "has slots, and does not take experts in host memory",
        None,
    ),
    "weights that are taken by two indices": (swapped_members, "is no weight|that were not chosen for it", None),
}


@pytest.mark.parametrize("name", CASES)
def test_one_thing_wrong_is_refused(name: str, model: ExpertModel, plan: Plan) -> None:
    change, by_check, by_core = CASES[name]
    broken = change(plan)
    with pytest.raises(PlanError, match=by_check):
        check_plan(broken, model.schedules, model.weights)
    if by_core is None:
        return
    with ExpertHarness(model) as harness:
        harness.install_plan(plan)
        harness.run()
        with pytest.raises(PenstockError, match=by_core):
            harness.session.install(plan_numbers(broken, model.weights))
        # What was installed still is, and what lies in its slots.
        harness._owner = 0
        harness.run()


def test_experts_that_are_not_read_in_host_memory_have_no_slots(model: ExpertModel, plan: Plan) -> None:
    """They lie there whole, and are filled: nothing is wrong but that the access names a bank."""
    weight = model.weights["gate0"]
    nbytes = -(-weight.nbytes // PAGE) * PAGE
    there = replace(
        plan,
        blocks=(*plan.blocks, Block(nbytes, ring=False)),
        ranges=(*plan.ranges, Range(nbytes, (len(plan.blocks),))),
        fills=(*plan.fills, Piece("gate0", 0, weight.nbytes, len(plan.ranges), 0)),
    )
    broken = placement(0, 1, range_index=len(plan.ranges))(there)
    with pytest.raises(PlanError, match="has slots, and does not take experts in host memory by index"):
        check_plan(broken, model.schedules, model.weights)
    with ExpertHarness(model) as harness, pytest.raises(PenstockError, match="needs to be in"):
        harness.session.install(plan_numbers(broken, model.weights))
    # Without a bank it is sound; but the other weight of it is chosen for by nobody then.
    sound = there
    for number, found in enumerate(plan.methods):
        for position, placed in enumerate(found.placements):
            if placed.weight == "gate0":
                sound = placement(number, position, range_index=len(plan.ranges), bank=None, chooses=False)(sound)
    with pytest.raises(PlanError, match="slots that were not chosen for it"):
        check_plan(sound, model.schedules, model.weights)


def test_packed_experts_have_no_slots(model: ExpertModel, plan: Plan) -> None:
    """Which kernels cannot copy them from: only the check knows what is packed in the file, and the core at install."""
    with pytest.raises(PlanError, match="reads experts of 'gate0', which is packed|is packed"):
        check_plan(plan, model.schedules, model.weights, packed={"gate0": (0, 4096)})


def test_members_of_another_routing(model: ExpertModel, plan: Plan) -> None:
    """The same plan for a program that takes the second weight by an index of its own."""
    first = model.schedules[0]
    accesses = tuple(replace(access, routing=99) if access.weight == "down0" else access for access in first.accesses)
    other = (Schedule(first.method, accesses, first.steps), *model.schedules[1:])
    with pytest.raises(PlanError, match="reads slots that were not chosen for it"):
        check_plan(plan, other, model.weights)
    unnamed = tuple(replace(a, routing=None) if a.weight == "down0" else a for a in first.accesses)
    with pytest.raises(PlanError, match="has slots, and does not take experts in host memory by index"):
        check_plan(plan, (Schedule(first.method, unnamed, first.steps), *model.schedules[1:]), model.weights)


def test_whatever_a_number_of_a_bank_is_the_check_says_so_by_its_own_error(model: ExpertModel, plan: Plan) -> None:
    """Also what no whole number is; and what it accepts runs right."""
    odd: list[Any] = [None, -1, 0, 1, 2, 7, 15, 255, 256, 4096, 2**31, 2**63, 1.5, "x", True]
    accepted: list[Plan] = []
    changes: list[Change] = []
    for value in odd:
        for name in ("experts", "slots", "range_index", "range_offset_bytes"):
            changes += [bank(number, **{name: value}) for number in (0, 1)]
        for name in ("row_bytes", "range_index", "range_offset_bytes", "weight"):
            changes += [member(0, 1, **{name: value})]
        changes += [placement(1, 4, bank=value), placement(1, 4, chooses=value)]
    for change in changes:
        broken = change(plan)
        try:
            check_plan(broken, model.schedules, model.weights)
        except PlanError:
            continue
        if broken != plan:
            accepted.append(broken)
    # Fewer slots than there is room for are as good.
    assert accepted and all(one.banks[0].slots < 5 or one.banks[1].slots < 3 for one in accepted)
    for one in accepted:
        with ExpertHarness(model) as harness:
            harness.install_plan(one)
            for number in range(6):
                harness.run(number // 2 % 2)


def test_direct_is_where_a_bank_reads(plan: Plan) -> None:
    found: list[Placement] = [placed for one in plan.methods for placed in one.placements if placed.has_slots]
    assert len(found) == 10 and all(placed.range_index == DIRECT for placed in found)
