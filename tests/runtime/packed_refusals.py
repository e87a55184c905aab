"""Scenarios of packed weights that are refused: what the core is told of them, and what plans do with them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.plan.packed import SlotSizes, with_packed
from penstock.plan.plan import DIRECT, Block, MethodPlan, Piece, Plan, Range, Slots, Store
from penstock.record import VERSION
from penstock.runtime.records import Numbers, packed_numbers, plan_numbers
from tests.native.session import make_session
from tests.runtime.packed_models import PackedModel, packed_chain
from tests.runtime.scenario_tools import refused, scenario
from tests.runtime.session_harness import PAGE, SessionHarness, chain, write_model
from tests.runtime.soft import SoftDriver

SOME_BYTES = 150_000


def _says(action: Callable[[], object], *words: str) -> None:
    text = str(refused(action, PenstockError))
    assert all(word in text for word in words), text


def _open(driver: SoftDriver, model: PackedModel, numbers: Numbers, *, lru: bool = False) -> None:
    source = model.registered()
    options = {"extents": model.extents, "lru": lru, "device_index": 0, "poison": True, "packed": numbers}
    make_session(driver, model.path, source, **options).close()  # type: ignore[arg-type]


def _numbers(values: Sequence[int]) -> Numbers:
    return (ctypes.c_int64 * len(values))(*values)


@scenario
def records_of_packed_weights_are_refused(folder: Path) -> None:
    model = packed_chain(folder, count=2)
    sound = list(model.packed)
    blocks = model.blocks["w0"]
    # Behind the version and how many there are, a weight's numbers: its own, bytes, kind, where its blocks lie, where
    # each of them begins, and the end.
    version, count, weight, raw, kind, data, first, second, _, end = range(10)
    assert sound[end] == blocks.begins_bytes[-1] and sound[end + 1] == 1
    damages: list[tuple[Mapping[int, int], str]] = [
        ({version: VERSION - 1}, f"are of version {VERSION - 1}, needs version {VERSION}"),
        ({count: -1}, "is -1, needs to be in [0,"),
        ({count: 1}, f"have {len(sound)} numbers, and end after {end + 1}"),
        ({count: 2**62}, "needs to be in [0,"),
        ({kind: 0}, "0 is no kind"),
        ({kind: 7}, "7 is no kind"),
        ({kind: -1}, "is -1, needs"),
        ({kind: 1 + 2**32}, "needs to be in [0, 2147483647)"),
        ({weight: -1}, "is -1, needs to be in [0, 3)"),
        ({weight: 3}, "is 3, needs to be in [0, 3)"),
        ({weight: 2**63 - 1}, "needs to be in [0, 3)"),
        ({end + 1: 0}, "is 0, needs to be in [1, 3)"),
        ({raw: 0}, "is 0, needs to be in [1,"),
        ({raw: -2}, "is -2, needs to be in [1,"),
        ({raw: sound[raw] - 1}, "are no whole values"),
        ({first: 16}, "is 16, needs to be in [0, 1)"),
        ({second: -16}, "is -16, needs to be in [0,"),
        ({second: -(2**63)}, "needs to be in [0,"),
        ({second: sound[second] + 8}, "which no 65536 bytes take"),
        ({second: 16}, "block 0 has 16 bytes"),
        ({second: sound[end]}, f"block 0 has {sound[end]} bytes"),
        ({end: sound[end] - 4096}, "which no 5000 bytes take"),
        ({end: sound[end] + 16}, f"needs to be in [0, {sound[end] + 1})"),
        ({data: -16}, "is -16, needs to be in [0,"),
        ({data: 16}, f"is {sound[end]}, needs to be in [0, {sound[end] - 15})"),
        ({data: 2**63 - 1}, "needs to be in [0,"),
    ]
    with SoftDriver(PAGE, 0, poison=True) as driver:
        for changes, text in damages:
            changed = _numbers([changes.get(index, number) for index, number in enumerate(sound)])
            _says(lambda: _open(driver, model, changed), "packed weights", text)  # noqa: B023
        for length in range(1, len(sound)):
            cut = _numbers(sound[:length])
            _says(lambda: _open(driver, model, cut), "packed weights")  # noqa: B023
        _says(lambda: _open(driver, model, model.packed, lru=True), "the policy lru has none")
        _open(driver, model, model.packed)
        _open(driver, model, packed_numbers([(0, model.offsets["w0"], blocks)]))
        assert not driver.counts().alive()


def _first_method(plan: Plan, **changes: Any) -> Plan:
    method: MethodPlan = replace(plan.methods[0], **changes)
    return replace(plan, methods=(method, *plan.methods[1:]))


@scenario
def plans_that_packed_weights_cannot_follow_are_refused(folder: Path) -> None:
    """When they are installed. The plan before them is gone then, and a sound one can be installed."""
    model = packed_chain(folder)
    plan = model.divided(stored_bytes=SOME_BYTES)
    unstored = model.divided()
    whole = model.plan(model.full_bytes)
    assert plan.slots is not None and len(plan.stores) > 1
    store = plan.stores[0]
    room = len(plan.ranges)
    # A page of its own, with bytes of a weight that nobody reads there.
    astray = replace(
        plan,
        blocks=(*plan.blocks, Block(PAGE, ring=False)),
        ranges=(*plan.ranges, Range(PAGE, (len(plan.blocks),))),
        fills=(*plan.fills, Piece("w0", 0, 64, room, 8)),
    )
    placements = [
        replace(one, range_index=DIRECT, range_offset_bytes=0, stay=None) if one.weight == "w0" else one
        for one in whole.methods[0].placements
    ]
    plain = Store(replace(store.piece, weight="plain", weight_offset_bytes=0, nbytes=PAGE), store.packed_bytes)
    cases: list[tuple[Plan, str]] = [
        (replace(plan, methods=unstored.methods), "is partly of those that stay"),
        (replace(plan, slots=None), "no slots for it to pass through"),
        (replace(plan, slots=replace(plan.slots, nbytes=16 * 1024)), "a slot of the plan 16384"),
        (replace(plan, slots=replace(plan.slots, nbytes=plan.slots.nbytes - 8)), "no multiple of sixteen"),
        (astray, "go to an address that is not theirs"),
        (replace(plan, stores=(replace(store, packed_bytes=store.packed_bytes - 16), *plan.stores[1:])), "do not fit"),
        (replace(plan, stores=(plain,)), "that is not packed was to stay so"),
        (_first_method(whole, placements=tuple(placements)), "only unpacked ones can be"),
    ]
    with SessionHarness(model) as harness:
        for changed, text in cases:
            _says(lambda: harness.install_plan(changed), text)  # noqa: B023
            assert harness.session.memory()[0] == 0
            harness.install_plan(plan)
            harness.run()
        # Where it is decoded from is seen when it is: a plan of the planner's has it at a multiple.
        moved = replace(store, piece=replace(store.piece, range_offset_bytes=store.piece.range_offset_bytes + 8))
        harness.install_plan(replace(plan, stores=(moved,)))
        _says(harness.run, "no multiple of sixteen")
        harness.install_plan(plan)
        harness.run()


@scenario
def memory_for_packed_weights_is_for_nothing_else(folder: Path) -> None:
    model = packed_chain(folder)
    plan = model.divided(stored_bytes=SOME_BYTES)
    slots, stores = plan.slots, plan.stores
    assert slots is not None and len(stores) > 1
    method = plan.methods[0]
    first = method.copies[0]
    over = replace(first, piece=replace(first.piece, nbytes=PAGE, range_index=slots.range_index, range_offset_bytes=0))
    placed = [
        replace(one, range_index=slots.range_index, range_offset_bytes=0, stay=None) if one.weight == "plain" else one
        for one in method.placements
    ]
    twice = replace(stores[1], piece=replace(stores[1].piece, range_offset_bytes=stores[0].piece.range_offset_bytes))
    in_slots = replace(stores[0], piece=replace(stores[0].piece, range_index=slots.range_index, range_offset_bytes=0))
    again = Range(plan.ranges[slots.range_index].nbytes, plan.ranges[slots.range_index].blocks)
    store_again = Range(
        plan.ranges[stores[0].piece.range_index].nbytes, plan.ranges[stores[0].piece.range_index].blocks
    )
    cases: list[tuple[Plan, str]] = [
        (replace(plan, stores=(stores[0], twice, *stores[2:])), "two rooms overlap"),
        (replace(plan, stores=(in_slots, *stores[1:])), "two rooms overlap"),
        (replace(plan, ranges=(*plan.ranges, again)), "is for packed weights or experts, and another range maps it"),
        (
            replace(plan, ranges=(*plan.ranges, store_again)),
            "is for packed weights or experts, and another range maps it",
        ),
        (replace(plan, fills=(Piece("plain", 0, 64, slots.range_index, 0),)), "a fill goes to range"),
        (replace(plan, fills=(Piece("plain", 0, 64, stores[0].piece.range_index, 0),)), "a fill goes to range"),
        (_first_method(plan, copies=(over, *method.copies[1:])), "a copy"),
        (_first_method(plan, placements=tuple(placed)), "an access goes to range"),
        (replace(plan, slots=replace(slots, count=-1)), "needs to be in [0"),
        (replace(plan, slots=replace(slots, range_index=len(plan.ranges))), "needs to be in [0"),
        (replace(plan, slots=replace(slots, nbytes=slots.nbytes * 2)), "needs to be in [1"),
        (replace(plan, slots=replace(slots, count=slots.count + 1)), "needs to be in [1"),
        (replace(plan, stores=(replace(stores[0], packed_bytes=2**40), *stores[1:])), "needs to be in [1"),
    ]
    with SessionHarness(model) as harness:
        harness.install_plan(plan)
        for changed, text in cases:
            _says(lambda: harness.session.install(plan_numbers(changed, model.weights)), text)  # noqa: B023
        # Refused before anything was touched.
        harness.run()


@scenario
def a_file_without_packed_weights_has_no_use_for_their_memory(folder: Path) -> None:
    names = [f"w{index}" for index in range(4)]
    model = write_model(folder / "plain.ptd", [chain(*names)], dict.fromkeys(names, 2 * PAGE))
    plan = model.plan(model.floor_bytes)
    with SessionHarness(model) as harness:
        slots = with_packed(plan, {}, SlotSizes(2, 1024, PAGE), 0)
        assert slots.slots == Slots(2, 1024, len(plan.ranges))
        _says(lambda: harness.install_plan(slots), "the weights file has none")
        store = Store(Piece("w0", 0, PAGE, len(plan.ranges), 0), PAGE)
        _says(lambda: harness.install_plan(replace(slots, slots=None, stores=(store,))), "the weights file has none")
        harness.install_plan(plan)
        harness.run()
