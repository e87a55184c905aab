"""Scenarios of packed weights: each makes one of the link, the decoding or the kernels late, on purpose.

Packed bytes go over the link on a stream of its own into slots, and are decoded on the copy stream into ring pages: a
slot is full before it is decoded, and decoded before it is filled again. tests/runtime/scenarios.py has the rest.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

from penstock.errors import DriverCallError, PenstockError, WeightsChangedError
from penstock.plan.check import check_plan
from penstock.plan.packed import BLOCK_BYTES
from penstock.plan.plan import DIRECT, Plan
from tests.native.session import uninstall
from tests.runtime.packed_models import WEIGHT_BYTES, PackedModel, packed_chain, write_packed
from tests.runtime.scenario_tools import (
    COPIES_FIRST,
    KERNELS_FIRST,
    PART_BYTES,
    TICK_NS,
    in_device_memory,
    refused,
    scenario,
)
from tests.runtime.session_harness import INLINE, PAGE, RunFailed, SessionHarness, chain, staged
from tests.runtime.soft import SoftDriver

# Of what streams in a chain of five weights: about a third.
SOME_BYTES = 150_000
HOST_PART_BYTES = 16 << 20  # what is decoded at a time on the host; csrc/packed/packed_source.cpp has the same


def _plans(model: PackedModel) -> list[Plan]:
    """With nothing that stays packed and with some; with slots of one block and of several, two of them and many."""
    return [
        model.divided(),
        model.divided(stored_bytes=SOME_BYTES),
        model.divided(slots=3, stored_bytes=SOME_BYTES),
        model.divided(blocks_a_slot=2, spare_bytes=10 * PAGE),
        model.divided(slots=40, stored_bytes=SOME_BYTES, spare_bytes=5 * PAGE),
    ]


def _parts(model: PackedModel, plan: Plan, method: int = 0) -> dict[int, bytes]:
    """By copy that goes over the link, the packed bytes that it brings."""
    copies = plan.methods[method].copies
    return {
        index: model.packed_of(copy.piece.weight, copy.piece.weight_offset_bytes, copy.piece.nbytes)
        for index, copy in enumerate(copies)
        if copy.packed_bytes
    }


# ---- slots


@scenario
def decoding_waits_for_the_link(folder: Path) -> None:
    model = packed_chain(folder)
    for plan in _plans(model):
        for poison in (True, False):
            with SessionHarness(model, poison=poison) as harness:
                stream = harness.stream()
                with harness.late_link():
                    harness.install_plan(plan)
                    for _ in range(2):
                        harness.run()
                        harness.run(stream=stream)


@scenario
def the_link_waits_for_decoding(folder: Path) -> None:
    model = packed_chain(folder)
    for plan in _plans(model):
        for poison in (True, False):
            with SessionHarness(model, poison=poison) as harness:
                stream = harness.stream()
                with harness.late_copies():
                    harness.install_plan(plan)
                    for _ in range(2):
                        harness.run()
                        harness.run(stream=stream)


@scenario
def everything_packed_is_late(folder: Path) -> None:
    model = packed_chain(folder, back=True)
    for plan in _plans(model):
        with SessionHarness(model) as harness:
            stream = harness.stream(late=True)
            harness.install_plan(plan)
            with harness.late_copies(), harness.late_link():
                for run in range(6):
                    harness.run(run // 2 % 2, stream, check=False)
                harness.check()
                harness.check_counters()


@scenario
def a_slot_holds_poison_once_it_is_decoded(folder: Path) -> None:
    """So that what an earlier copy has left is never right by luck: after an install, whose residents pass through
    slots as well, after runs and after replays."""
    model = packed_chain(folder)
    for plan in (model.divided(slots=40), model.divided(slots=40, spare_bytes=40 * PAGE)):
        parts = _parts(model, plan)
        fills = {
            index: model.packed_of(piece.weight, piece.weight_offset_bytes, piece.nbytes)
            for index, piece in enumerate(plan.fills)
            if piece.weight in model.begins
        }
        with SoftDriver(PAGE, 0, poison=False) as driver:
            for poison in (True, False):
                with SessionHarness(model, driver=driver, poison=poison) as harness:
                    harness.install_plan(plan)
                    assert bool(in_device_memory(parts)) is not poison
                    assert not (poison and in_device_memory(fills))
                    harness.run()
                    captured, stream = harness.capture(), harness.stream()
                    harness.replay(captured, stream)
                    harness.run(stream=stream)
                    assert bool(in_device_memory(parts)) is not poison


@scenario
def without_poison_no_slot_is_filled(folder: Path) -> None:
    model = packed_chain(folder)
    with SessionHarness(model, poison=False) as harness:
        harness.driver.fail_at(1, call="fill")
        harness.install_plan(model.divided(stored_bytes=SOME_BYTES, spare_bytes=5 * PAGE))
        harness.run()
        harness.replay(harness.capture(), harness.stream())
        assert not harness.driver.failed_call()


# ---- what stays packed, and what is resident


@scenario
def what_stays_packed_is_not_poisoned_over(folder: Path) -> None:
    """The poison of a new plan's memory is made on the copy stream, and what stays comes over the link."""
    model = packed_chain(folder)
    plan = model.divided(stored_bytes=SOME_BYTES)
    assert plan.stores
    with SessionHarness(model) as harness:
        for _ in range(2):
            with harness.late_copies():
                harness.install_plan(plan)
            harness.run()


@scenario
def what_stays_packed_is_there_before_a_run(folder: Path) -> None:
    model = packed_chain(folder)
    # Nothing goes over the link that could have waited in its stead.
    everything = model.divided(stored_bytes=10 * WEIGHT_BYTES)
    assert everything.stores and not _parts(model, everything)
    for plan in (everything, model.divided(stored_bytes=SOME_BYTES)):
        for poison in (True, False):
            with SessionHarness(model, poison=poison) as harness, harness.late_link():
                harness.install_plan(plan)
                harness.run()


@scenario
def residents_are_decoded_at_install(folder: Path) -> None:
    """On the device, through slots; where a plan has none, on the host, whose memory is not pinned for it."""
    model = packed_chain(folder)
    some = [model.divided(slots=slots, spare_bytes=60 * PAGE) for slots in (2, 3)]
    whole = model.plan(model.full_bytes)
    assert all(plan.fills and plan.slots for plan in some) and whole.slots is None
    for late in (SessionHarness.late_copies, SessionHarness.late_link, lambda harness: nullcontext()):
        with SessionHarness(model) as harness, late(harness):
            for plan in (*some, whole):
                harness.install_plan(plan)
                harness.run()
            assert harness.driver.counts().peak_host_bytes == 0
    # Nothing else is decoded when these are installed: what is not resident stays packed, and the link is not measured.
    with SessionHarness(model) as harness:
        harness.driver.fail_at(1, call="decode")
        refused(
            lambda: harness.install_plan(model.divided(stored_bytes=10 * WEIGHT_BYTES, spare_bytes=60 * PAGE)),
            DriverCallError,
        )
        harness.driver.fail_at(1, call="decode")
        harness.install_plan(whole)
        assert not harness.driver.failed_call()


@scenario
def a_weight_larger_than_the_host_s_part_is_decoded(folder: Path) -> None:
    nbytes = HOST_PART_BYTES + 2 * BLOCK_BYTES + 6
    model = write_packed(folder / "large.ptd", [chain("large")], {"large": nbytes})
    with SessionHarness(model) as harness, harness.late_copies():
        harness.install(model.full_bytes)
        harness.run()


@scenario
def the_host_s_part_is_kept_until_a_wait_succeeds(folder: Path) -> None:
    """While the device may still read there."""
    model = packed_chain(folder, count=2)
    plan = model.plan(model.full_bytes)
    with SessionHarness(model) as harness, harness.late_copies():
        refusals = 0
        for n in range(1, 12):
            harness.driver.fail_at(n, call="synchronize_stream")
            try:
                harness.install_plan(plan)
            except DriverCallError:
                refusals += 1
            harness.driver.fail_at(0)
        # Of the two weights at least.
        assert refusals >= 2
        harness.install_plan(plan)
        harness.run()


@scenario
def a_cut_file_is_told_when_residents_are_decoded(folder: Path) -> None:
    model = packed_chain(folder)
    for plan in (model.plan(model.full_bytes), model.divided(spare_bytes=60 * PAGE)):
        whole = model.path.read_bytes()
        with SessionHarness(model) as harness:
            with model.path.open("r+b") as file:
                file.truncate(PAGE)
            refused(lambda: harness.install_plan(plan), WeightsChangedError)  # noqa: B023
        model.path.write_bytes(whole)


@scenario
def a_plan_takes_the_place_of_another(folder: Path) -> None:
    """With other slots and other stores, or none; on a stream that is late when the first one goes."""
    model = packed_chain(folder)
    with SessionHarness(model) as harness:
        stream = harness.stream(late=True)
        for plan in (*_plans(model), model.plan(model.full_bytes), model.divided(stored_bytes=SOME_BYTES)):
            with harness.late_copies():
                harness.install_plan(plan)
                captured = harness.capture()
                harness.run(stream=stream, check=False)
                harness.replay(captured, stream, check=False)
            harness.check_memory(max(one.device_bytes for one in (*_plans(model), model.plan(model.full_bytes))))
        harness.check()
        left = []
        for plan in (model.divided(), model.divided(slots=40)):
            harness.install_plan(plan)
            uninstall(harness.session)
            assert harness.session.memory()[0] == 0
            left.append(harness.driver.counts().events)
        # None that a slot had.
        assert left[0] == left[1]


@scenario
def what_is_not_packed_is_read_in_place(folder: Path) -> None:
    model = packed_chain(folder)
    whole = model.plan(model.full_bytes)
    method = whole.methods[0]
    placements = [
        replace(one, range_index=DIRECT, range_offset_bytes=0) if one.weight == "plain" else one
        for one in method.placements
    ]
    with SessionHarness(model) as harness:
        harness.install_plan(replace(whole, methods=(replace(method, placements=tuple(placements)),)))
        harness.run()
        assert harness.last.bytes_in_place == model.weights["plain"].nbytes


# ---- host memory, the link and failures


@scenario
def packed_weights_are_staged(folder: Path) -> None:
    """In the order in which they will be copied: without what stays, and with what is not packed."""
    model = packed_chain(folder, back=True)
    for plan in _plans(model):
        for source in (staged(PAGE, 1, 1), staged(30_000, 3, 2)):
            for late in (SessionHarness.late_copies, SessionHarness.late_link):
                with SessionHarness(model, source=source) as harness:
                    harness.install_plan(plan)
                    with late(harness):
                        for method in (0, 0, 1, 0):
                            harness.run(method)


@scenario
def the_link_is_measured_with_what_goes_over_it(folder: Path) -> None:
    """Once with every copy that takes the link, and once with parts of the largest: what stays packed takes none."""
    large = {f"w{index}": 2 * PART_BYTES for index in range(4)}
    for model in (
        packed_chain(folder),
        write_packed(folder / "large.ptd", [chain(*large)], large),
    ):
        for stored_bytes in (0, SOME_BYTES, 10 * WEIGHT_BYTES):
            plan = model.divided(stored_bytes=stored_bytes)
            copies = [copy for copy in plan.methods[0].copies if copy.link_bytes]
            with SessionHarness(model, poison=False) as harness:
                harness.driver.set_clock(0, TICK_NS)
                # A copy is then made when its decoding asks for it, and so between the two events.
                with harness.late_link():
                    harness.install_plan(plan)
                samples = harness.session.link()
                if not copies:
                    assert not samples
                    continue
                # As they go over the link, not as they are decoded.
                link_bytes = sum(copy.link_bytes for copy in copies)
                assert (samples[0].copies, samples[0].nbytes) == (len(copies), link_bytes)
                blocks = [
                    -(-(copy.piece.weight_offset_bytes + copy.piece.nbytes) // BLOCK_BYTES)
                    - copy.piece.weight_offset_bytes // BLOCK_BYTES
                    for copy in plan.methods[0].copies
                    if copy.packed_bytes
                ]
                # With slots of one block: each is one copy and one decoding. What is not packed is a copy.
                assert samples[0].ns == (2 * sum(blocks) + len(copies) - len(blocks)) * TICK_NS
                largest = max((copy.piece for copy in copies), key=lambda piece: piece.nbytes)
                begin, parts = largest.weight_offset_bytes, largest.nbytes // PART_BYTES
                part_bytes = [
                    len(model.packed_of(largest.weight, begin + index * PART_BYTES, PART_BYTES))
                    if largest.weight in model.begins
                    else PART_BYTES
                    for index in range(parts)
                ]
                measured = [(sample.copies, sample.nbytes) for sample in samples[1:]]
                assert measured == [(parts, sum(part_bytes))] * (parts > 0)


@scenario
def packed_bytes_have_a_lane_of_their_own(folder: Path) -> None:
    """On a clock of ticks: each slot's copy is one, and lies before the end of the decoding that it is for."""
    model = packed_chain(folder)
    plan = model.divided(slots=3, stored_bytes=SOME_BYTES)
    copies = plan.methods[0].copies
    with SessionHarness(model, poison=False) as harness:
        harness.install_plan(plan)
        harness.run(check=False)
        harness.driver.set_clock(12345, TICK_NS)
        harness.session.start_trace()
        # One after the other, or the clock, which all streams share, would move between two events of one of them.
        with harness.late_copies(), harness.late_link():
            harness.run(check=False)
            harness.run(check=False)
            # A run that fails leaves what had ended, and nothing that is taken for a later one's.
            harness.begin()
            harness.acquire(0)
            with suppress(RunFailed):
                harness.acquire(999)
            harness._owner = None
            harness.run(check=False)
        spans = harness.session.stop_trace()
        assert [span.begin_ns for span in spans] == sorted(span.begin_ns for span in spans)
        made = {(span.run, span.index): span for span in spans if span.lane == "copy"}
        link = [span for span in spans if span.lane == "link"]
        assert all(span.end_ns - span.begin_ns == TICK_NS for span in link)
        assert all(one.end_ns <= other.begin_ns for one, other in pairwise(link))
        for run in (2, 3):
            brought = Counter[int]()
            for span in link:
                if span.run == run:
                    brought[span.index] += span.nbytes
                    assert span.end_ns <= made[run, span.index].end_ns
            assert brought == {index: copy.packed_bytes for index, copy in enumerate(copies) if copy.packed_bytes}


@scenario
def a_failed_run_is_waited_for_on_the_link(folder: Path) -> None:
    """Packed bytes are on their way, and nothing waits for them yet: that they have come could not be recorded."""
    model = packed_chain(folder)
    plan = model.divided()
    first = plan.methods[0].copies[plan.methods[0].prologue[0]].piece
    block = {0: model.packed_of(first.weight, first.weight_offset_bytes, BLOCK_BYTES)}
    with SoftDriver(PAGE, 0, poison=False) as driver, SessionHarness(model, driver=driver, poison=False) as harness:
        harness.install_plan(plan)
        assert not in_device_memory(block)
        with harness.late_link():
            harness.driver.fail_at(1, call="record")
            refused(harness.begin, DriverCallError)
            assert in_device_memory(block), "the run was given up while its copy was on its way"
        harness.run()


@scenario
def what_a_failed_run_left_in_a_slot_is_poison(folder: Path) -> None:
    """It came over the link, and was never decoded: the next run must bring it again. What stays packed does stay."""
    model = packed_chain(folder)
    # What was decoded when the plan was installed is overwritten by then, in all of them.
    for plan in (model.divided(), model.divided(slots=3), model.divided(stored_bytes=SOME_BYTES)):
        first = next(
            copy.piece for copy in (plan.methods[0].copies[n] for n in plan.methods[0].prologue) if copy.packed_bytes
        )
        block = {0: model.packed_of(first.weight, first.weight_offset_bytes, BLOCK_BYTES)}
        with SoftDriver(PAGE, 0, poison=False) as driver:
            for call, poison in product(("record", "decode"), (True, False)):
                with SessionHarness(model, driver=driver, poison=poison) as harness:
                    harness.install_plan(plan)
                    assert not in_device_memory(block)
                    with harness.late_link(), harness.late_copies():
                        harness.driver.fail_at(1, call=call)
                        refused(harness.begin, DriverCallError)
                        assert harness.driver.failed_call() == call
                        assert bool(in_device_memory(block)) is not poison
                    harness.run()


# ---- graphs (S9)


@scenario
def slots_of_a_graph(folder: Path) -> None:
    """Fewer parts than slots and more, every stream late in its turn, runs and replays of two methods in turn."""
    model = packed_chain(folder, back=True)
    for plan in _plans(model):
        with SessionHarness(model) as harness:
            harness.install_plan(plan)
            stream, late = harness.stream(), harness.stream(late=True)
            harness.run(stream=stream)
            graphs = [harness.capture(0), harness.capture(1), harness.capture(0)]
            for order in (COPIES_FIRST, KERNELS_FIRST):
                for graph in graphs:
                    harness.replay(graph, stream, order=order)
                    harness.replay(graph, late, order=order, check=False)
                    harness.replay(graph, late, order=order, check=False)
                    harness.run(graph.method, late, check=False)
                    harness.replay(graph, late, order=order, check=False)
                    harness.check()
                    harness.check_counters()


@scenario
def slots_before_in_and_after_a_launch(folder: Path) -> None:
    """A slot that a run outside has filled is decoded before the graph fills it; and the graph's own is, before the
    copies behind the launch do."""
    model = packed_chain(folder, back=True)
    for plan in _plans(model):
        for poison in (True, False):
            with SessionHarness(model, poison=poison) as harness:
                harness.install_plan(plan)
                graphs = [harness.capture(0), harness.capture(1)]
                streams = [harness.stream(), harness.stream(late=True)]
                for stream in streams:
                    for order in (COPIES_FIRST, KERNELS_FIRST):
                        for late in (SessionHarness.late_copies, SessionHarness.late_link):
                            with late(harness):
                                harness.run(0, stream, check=False)
                                harness.replay(graphs[0], stream, order=order, check=False)
                                harness.replay(graphs[1], stream, order=order, check=False)
                                harness.run(1, stream, check=False)
                                harness.replay(graphs[0], stream, order=order, check=False)
                                harness.replay(graphs[0], stream, order=order, check=False)
                                harness.run(0, stream, check=False)
                                harness.check()
                                harness.check_counters()


@scenario
def one_slot_is_enough(folder: Path) -> None:
    """For the core: each part then waits for the one before it. Planners make more."""
    model = packed_chain(folder)
    plan = model.divided(stored_bytes=SOME_BYTES, spare_bytes=30 * PAGE)
    assert plan.slots is not None and len(plan.fills) > 1
    for poison in (True, False):
        with SessionHarness(model, poison=poison) as harness:
            with harness.late_copies():
                harness.install_plan(replace(plan, slots=replace(plan.slots, count=1)))
            captured, stream = harness.capture(), harness.stream()
            for late in (SessionHarness.late_copies, SessionHarness.late_link):
                with late(harness):
                    harness.run()
                    for order in (COPIES_FIRST, KERNELS_FIRST):
                        harness.replay(captured, stream, order=order)


@scenario
def a_graph_that_begins_with_the_link(folder: Path) -> None:
    """The first thing in it is a packed weight on its way: nothing else of the graph comes before it."""
    model = packed_chain(folder)
    plan = model.divided()
    method = plan.methods[0]
    copies = [
        replace(copy, issue_before=0) if method.stays[copy.stay].accesses[0] == 0 else copy for copy in method.copies
    ]
    copies.sort(key=lambda copy: copy.issue_before)
    first = replace(plan, methods=(replace(method, copies=tuple(copies)),))
    check_plan(first, model.schedules, model.weights, packed=model.begins)
    assert first.methods[0].copies[0].packed_bytes and first.methods[0].copies[0].issue_before == 0
    for poison in (True, False):
        with SessionHarness(model, poison=poison) as harness:
            harness.install_plan(first)
            captured, stream = harness.capture(), harness.stream()
            for order in (COPIES_FIRST, KERNELS_FIRST):
                for _ in range(3):
                    harness.replay(captured, stream, order=order)
                harness.run(stream=stream)


@scenario
def a_capture_of_packed_weights_that_fails(folder: Path) -> None:
    """It changes nothing, wherever it fails; and its events are made once."""
    model = packed_chain(folder)
    with SessionHarness(model) as harness:
        harness.install_plan(model.divided(stored_bytes=SOME_BYTES))
        stream, side = harness.stream(), harness.stream()
        harness.run(stream=stream)
        for call in ("create_event", "record", "wait", "wait_external", "record_external", "decode", "copy_to_device"):
            for n in (1, 3):
                harness.driver.fail_at(n, call=call)
                try:
                    harness.capture(0, side)
                    raise AssertionError(f"a failed {call} went unnoticed")
                except (PenstockError, RunFailed):
                    assert harness.driver.failed_call() == call
                harness.run(stream=stream)
        captured = harness.capture(0, side)
        events = harness.driver.counts().events
        other = harness.capture(0, side)
        assert harness.driver.counts().events == events
        for graph in (captured, other, captured):
            harness.replay(graph, stream, order=COPIES_FIRST)
        harness.run(stream=INLINE)
