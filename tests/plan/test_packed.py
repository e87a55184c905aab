"""Plans of packed weights: within their budgets, proved by the check, and better the more they may have."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import pytest

from penstock.errors import BelowFloorError
from penstock.plan.check import PlanError, check_plan
from penstock.plan.packed import BLOCK_BYTES, SlotSizes, packed_bytes, with_packed
from penstock.plan.plan import DIRECT, Block, Copy, Piece, Plan, Range, Slots, Store
from penstock.plan.planner import Planner
from penstock.weight import Weight
from tests.plan.planning import placed_floor
from tests.plan.record.schedules import _decoder, program
from tests.runtime.session_harness import chain

PAGE = 4096
# What a block of Gaussian values takes.
PACKED_BYTES = 45_840
NAMES = [f"w{index}" for index in range(6)]
SIZES = {**dict.fromkeys(NAMES, 3 * BLOCK_BYTES + 700), "plain": 40 * PAGE}
WEIGHTS = {name: Weight(name, "bfloat16", (nbytes // 2,), (0,)) for name, nbytes in SIZES.items()}
SCHEDULE = chain(*NAMES[:3], "plain", *NAMES[3:])


def begins_of(nbytes: int, block_bytes: int = PACKED_BYTES) -> tuple[int, ...]:
    """The last block, of which a weight has only a part, takes as much of a block."""
    whole, rest_bytes = divmod(nbytes, BLOCK_BYTES)
    last = [-(-rest_bytes * block_bytes // BLOCK_BYTES // 16) * 16] if rest_bytes else []
    return tuple(accumulate([block_bytes] * whole + last, initial=0))


BEGINS = {name: begins_of(SIZES[name]) for name in NAMES}


def planner(begins: dict[str, tuple[int, ...]] = BEGINS) -> Planner:
    return Planner([SCHEDULE], WEIGHTS, page_bytes=PAGE, begins=begins)


def check(plan: Plan, budget_bytes: int | None = None) -> None:
    check_plan(plan, [SCHEDULE], WEIGHTS, budget_bytes=budget_bytes, packed=BEGINS)


# ---- the planner


def test_the_floor_is_exact() -> None:
    made = planner()
    floor = made.floor_bytes
    lowest = placed_floor([SCHEDULE], WEIGHTS, page_bytes=PAGE).floor_bytes
    # Two slots of a block each, from a multiple of 256 to the next, in whole pages.
    assert floor == lowest + -(-2 * 46_080 // PAGE) * PAGE < made.full_bytes
    with pytest.raises(
        BelowFloorError, match=f"the floor is {floor} bytes: .*and {floor - lowest} bytes for packed ones"
    ) as refused:
        made.plan(floor - 1)
    assert (refused.value.budget_bytes, refused.value.floor_bytes) == (floor - 1, floor)
    check(made.plan(floor), floor)
    assert made.floor().plan == made.plan(floor) and made.floor().floor_bytes == made.copying_bytes == floor


def test_a_floor_is_never_more_than_everything() -> None:
    """Where two slots are more than what streaming saves, everything is resident."""
    few = Planner([chain("w0", "w1")], WEIGHTS, page_bytes=PAGE, begins={name: BEGINS[name] for name in ("w0", "w1")})
    assert few.floor_bytes == few.full_bytes
    with pytest.raises(BelowFloorError, match=f": {few.floor_bytes} bytes for (all|2 resident) weights") as refused:
        few.plan(few.floor_bytes - 1)
    assert "on their way" not in str(refused.value), "terms that add up to more than the floor"
    plan = few.plan(few.floor_bytes)
    assert plan.slots is None and not plan.stores and not plan.methods[0].copies


def test_every_plan_is_within_its_budget_and_proved() -> None:
    made = planner()
    for budget_bytes in range(made.floor_bytes, made.full_bytes + 2 * PAGE, 5 * PAGE - 100):
        plan = made.plan(budget_bytes)
        check(plan, budget_bytes)
        for store in plan.stores:
            piece = store.piece
            assert piece.weight_offset_bytes % PAGE == 0
            assert piece.weight_offset_bytes + piece.nbytes == SIZES[piece.weight]
        for copy in plan.methods[0].copies:
            assert (copy.packed_bytes is None) == (copy.piece.weight == "plain")


def test_everything_is_resident_from_full_bytes_on() -> None:
    made = planner()
    for budget_bytes in (made.full_bytes, made.full_bytes + 10 * PAGE):
        plan = made.plan(budget_bytes)
        check(plan, budget_bytes)
        assert plan.slots is None and not plan.stores and not plan.methods[0].copies
        assert plan.methods[0].warm.bytes_streamed == plan.methods[0].warm.bytes_decoded == 0
    assert made.plan(made.full_bytes - PAGE).methods[0].copies


# ---- on a device's pages

DEVICE_PAGE = 2 << 20


def llama(layers: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    sizes, steps = _decoder(layers, 2048, 8192, 512, 32000)
    made = program(sizes, decode=steps)
    packed = {name: begins_of(nbytes) for name, nbytes in sizes.items() if nbytes >= BLOCK_BYTES and name != "embed"}
    return made, packed


def test_more_memory_streams_no_more_on_a_llama() -> None:
    made, begins = llama(16)
    of = Planner(made.schedules, made.weights, page_bytes=DEVICE_PAGE, placement="auto", begins=begins)
    floor, full = of.floor_bytes, of.full_bytes
    packed = sum(ends[-1] for ends in begins.values())
    streamed = []
    for budget_bytes in [floor + (full - floor) * part // 8 for part in range(9)]:
        plan = of.plan(budget_bytes)
        check_plan(plan, made.schedules, made.weights, budget_bytes=budget_bytes, packed=begins)
        streamed.append(plan.methods[0].warm.bytes_streamed)
        # Once all fits packed, beside the least that is decoded at a time, nothing goes over the link.
        over_link = [copy for method in plan.methods for copy in method.copies if copy.packed_bytes]
        assert bool(over_link) == (budget_bytes < floor + packed)
    assert streamed[-1] == 0 < streamed[0]
    assert all(more <= 1.01 * less for less, more in pairwise(streamed)), streamed


def test_the_link_gets_copies_as_large_as_a_slot() -> None:
    """Each costs time beside its bytes. What is left over is one copy, and weights that all go over the link are what
    they are."""
    made, begins = llama(16)
    of = Planner(made.schedules, made.weights, page_bytes=DEVICE_PAGE, placement="auto", begins=begins)
    for part in (3, 5, 7):
        plan = of.plan(of.floor_bytes + (of.full_bytes - of.floor_bytes) * part // 12)
        assert plan.slots is not None and plan.stores
        most_bytes = plan.slots.count * plan.slots.nbytes // 2
        partly = {store.piece.weight for store in plan.stores}
        copies = [copy for copy in plan.methods[0].copies if copy.piece.weight in partly and copy.packed_bytes]
        sent = Counter[str]()
        for copy in copies:
            sent[copy.piece.weight] += copy.link_bytes
        pages = PACKED_BYTES * (DEVICE_PAGE // BLOCK_BYTES)
        odd = [name for name, nbytes in sent.items() if nbytes % (most_bytes // pages * pages)]
        assert sent and len(odd) <= 1, (part, odd)


# ---- the check


@pytest.fixture
def plan() -> Plan:
    """Some of each weight stays packed, and some streams."""
    lowest = placed_floor([SCHEDULE], WEIGHTS, page_bytes=PAGE).plan
    made = with_packed(lowest, BEGINS, SlotSizes(3, 46_080, 34 * PAGE), 9 * PACKED_BYTES)
    check(made)
    assert len(made.stores) > 1 and made.methods[0].warm.bytes_streamed and made.slots
    return made


def refused(plan: Plan, message: str, **options: Any) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, [SCHEDULE], WEIGHTS, **{"packed": BEGINS, **options})


def with_store(plan: Plan, index: int = 0, *, packed_bytes: Any = None, **changes: Any) -> Plan:
    stores = list(plan.stores)
    changed = dataclasses.replace(stores[index], piece=dataclasses.replace(stores[index].piece, **changes))
    stores[index] = changed if packed_bytes is None else dataclasses.replace(changed, packed_bytes=packed_bytes)
    return dataclasses.replace(plan, stores=tuple(stores))


def with_slots(plan: Plan, **changes: Any) -> Plan:
    assert plan.slots is not None
    return dataclasses.replace(plan, slots=dataclasses.replace(plan.slots, **changes))


def with_copy(plan: Plan, index: int, **changes: Any) -> Plan:
    copies = list(plan.methods[0].copies)
    copies[index] = dataclasses.replace(copies[index], **changes)
    return dataclasses.replace(plan, methods=(dataclasses.replace(plan.methods[0], copies=tuple(copies)),))


def first(plan: Plan, wanted: Any) -> tuple[int, Copy]:
    return next((index, copy) for index, copy in enumerate(plan.methods[0].copies) if wanted(copy))


def test_slots_must_be_slots(plan: Plan) -> None:
    assert plan.slots is not None
    nbytes = plan.slots.nbytes
    for changes, message in (
        ({"range_index": -1}, "the range of slots"),
        ({"range_index": len(plan.ranges)}, "the range of slots"),
        ({"range_index": 1.0}, "the range of slots"),
        ({"count": 1}, "the number of slots"),
        ({"count": 2.0}, "the number of slots"),
        ({"count": 4}, "the size of a slot"),
        ({"nbytes": 0}, "the size of a slot"),
        ({"nbytes": nbytes + PAGE}, "the size of a slot"),
        ({"nbytes": nbytes - 8}, "not a multiple of 16"),
        ({"nbytes": PACKED_BYTES - 16}, "a block that no slot of the plan holds"),
    ):
        refused(with_slots(plan, **changes), message)
    refused(dataclasses.replace(plan, slots=None), "a block that no slot of the plan holds")


def test_what_stays_packed_must_be_there(plan: Plan) -> None:
    store = plan.stores[0]
    for changes, message in (
        ({"weight": "plain", "weight_offset_bytes": 0, "nbytes": PAGE}, "that is not packed in the file"),
        ({"packed_bytes": store.packed_bytes + 16}, "its blocks have"),
        ({"packed_bytes": store.packed_bytes - 16}, "its blocks have"),
        ({"packed_bytes": float(store.packed_bytes) + 0.5}, "its blocks have"),
        ({"range_index": len(plan.ranges)}, "its range"),
        ({"range_index": -1}, "its range"),
        ({"range_offset_bytes": -16}, "its offset"),
        ({"range_offset_bytes": plan.ranges[store.piece.range_index].nbytes}, "its offset"),
        ({"range_offset_bytes": store.piece.range_offset_bytes + 8}, "not at a multiple of 16|overlap"),
        ({"weight": "nobody"}, "nobody"),
        ({"nbytes": store.piece.nbytes + 2}, "w"),
    ):
        refused(with_store(plan, **changes), message)


def test_rooms_are_apart(plan: Plan) -> None:
    one, other = plan.stores[:2]
    assert plan.slots is not None
    refused(with_store(plan, 1, range_offset_bytes=one.piece.range_offset_bytes), "two rooms of packed weights overlap")
    refused(with_store(plan, 1, range_offset_bytes=other.piece.range_offset_bytes - 16), "two rooms")
    refused(with_store(plan, range_index=plan.slots.range_index, range_offset_bytes=0), "two rooms")
    refused(dataclasses.replace(plan, stores=(*plan.stores, one)), "two rooms")


def test_nothing_else_lies_in_a_room(plan: Plan) -> None:
    assert plan.slots is not None
    room = plan.slots.range_index
    (block,) = plan.ranges[room].blocks
    blocks = list(plan.blocks)
    blocks[block] = Block(blocks[block].nbytes, ring=True)
    with pytest.raises(PlanError):
        check(dataclasses.replace(plan, blocks=tuple(blocks)))
    again = Range(plan.ranges[room].nbytes, plan.ranges[room].blocks)
    refused(dataclasses.replace(plan, ranges=(*plan.ranges, again)), "mapped into two ranges")
    refused(dataclasses.replace(plan, fills=(*plan.fills, Piece("plain", 0, 64, room, 0))), "others lie there")
    placements = [
        dataclasses.replace(one, range_index=room, range_offset_bytes=0, stay=None) if one.weight == "plain" else one
        for one in plan.methods[0].placements
    ]
    method = dataclasses.replace(plan.methods[0], placements=tuple(placements))
    with pytest.raises(PlanError):
        check(dataclasses.replace(plan, methods=(method,)))


def test_a_ring_block_is_no_room(plan: Plan) -> None:
    """One page, which is a ring's and nobody's: large enough for a store of a small block."""
    page = Range(PAGE, (len(plan.blocks),))
    small = {**BEGINS, "w0": tuple(1024 * block for block in range(len(BEGINS["w0"])))}
    blocks, ranges = (*plan.blocks, Block(PAGE, ring=True)), (*plan.ranges, page)
    store = Store(Piece("w0", 3 * BLOCK_BYTES, 700, len(plan.ranges), 0), 1024)
    moved = dataclasses.replace(plan, blocks=blocks, ranges=ranges, stores=(store,))
    refused(moved, "packed weights lie in a block of the ring", packed=small)


def test_a_copy_takes_what_its_blocks_have(plan: Plan) -> None:
    index, copy = first(plan, lambda copy: copy.packed_bytes)
    assert copy.packed_bytes
    for wrong in (copy.packed_bytes - 16, copy.packed_bytes + 16, 0, None):
        refused(with_copy(plan, index, packed_bytes=wrong), "bytes over the link; its blocks have")
    index, copy = first(plan, lambda copy: copy.packed_bytes == 0)
    for wrong in (16, None):
        refused(with_copy(plan, index, packed_bytes=wrong), "bytes over the link; its blocks have 0")
    index, _ = first(plan, lambda copy: copy.piece.weight == "plain")
    for wrong in (0, 16):
        refused(with_copy(plan, index, packed_bytes=wrong), "is said to be packed, which the file has not")


def test_a_copy_is_stored_as_a_whole_or_not_at_all(plan: Plan) -> None:
    store = plan.stores[0]
    assert store.piece.nbytes > PAGE
    shorter = with_store(plan, nbytes=store.piece.nbytes - PAGE)
    begin = store.piece.weight_offset_bytes
    needed = packed_bytes(BEGINS[store.piece.weight], begin, begin + shorter.stores[0].piece.nbytes)
    refused(with_store(shorter, packed_bytes=needed), "of which only some stay packed")
    refused(dataclasses.replace(plan, stores=plan.stores[1:]), "its blocks have")


def test_what_is_packed_is_not_read_in_place(plan: Plan) -> None:
    whole = planner().plan(planner().full_bytes)
    method = whole.methods[0]
    placements = [
        dataclasses.replace(one, range_index=DIRECT, range_offset_bytes=0) if one.weight == "w0" else one
        for one in method.placements
    ]
    direct = dataclasses.replace(whole, methods=(dataclasses.replace(method, placements=tuple(placements)),))
    refused(direct, "reads 'w0' in host memory, where it is packed")
    check_plan(direct, [SCHEDULE], WEIGHTS, packed={name: BEGINS[name] for name in NAMES[1:]})


def test_a_file_that_is_not_packed(plan: Plan) -> None:
    refused(plan, "not packed in the file|is said to be packed", packed=None)
    assert isinstance(plan.slots, Slots)
