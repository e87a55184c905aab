"""One scenario per wait: each makes the other side late on purpose, so that without the wait it goes wrong every time.

Late is no matter of time: a late stream of the soft driver runs when somebody waits for it, and not before.


`python -m tests.runtime.scenarios NAME` plays one; what goes wrong without a wait may well end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from penstock.errors import (
    DeviceMemoryError,
    DriverCallError,
    PenstockError,
    ScheduleDivergedError,
    WeightsChangedError,
)
from penstock.plan.check import check_plan
from penstock.plan.plan import Block, Copy, MethodPlan, Piece, Placement, Plan, Range, Stay
from penstock.plan.planner import Planner
from penstock.schedule import Access, Schedule, Step
from tests.native.library import testing
from tests.native.session import acquire, copy_stream, uninstall

# Theirs are in the list, too.
from tests.runtime import expert_decisions, expert_scenarios, packed_refusals, packed_scenarios  # noqa: F401
from tests.runtime.scenario_tools import (
    COPIES_FIRST,
    KERNELS_FIRST,
    PART_BYTES,
    SCENARIOS,
    TICK_NS,
    device_pages,
    in_device_memory,
    memory,
    refused,
    scenario,
    streamed,
)
from tests.runtime.session_harness import (
    INLINE,
    PAGE,
    Model,
    RunFailed,
    SessionHarness,
    chain,
    models,
    staged,
    write_model,
)
from tests.runtime.soft import DriverFailure, Failure, SoftDriver


def _chain(folder: Path) -> Model:
    names = [f"w{i}" for i in range(6)]
    return write_model(folder / "weights.ptd", [chain(*names)], dict.fromkeys(names, 2 * PAGE))


# ---- the order of kernels and copies


@scenario
def copies_wait_for_readers(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream(late=True)
        for _ in range(3):
            harness.run(stream=stream, check=False)
        assert harness.check() == 18


@scenario
def kernels_wait_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream()
        with harness.late_copies():
            for _ in range(2):
                harness.run()
                harness.run(stream=stream)


@scenario
def a_piece_of_a_weight_is_waited_for(folder: Path) -> None:
    """Prefixes resident, suffixes in the ring, several stays under way: whoever waits for another's copy shows."""
    for model in models(folder).values():
        for budget_bytes in (model.floor_bytes, model.floor_bytes + 3 * PAGE):
            with SessionHarness(model) as harness:
                harness.install(budget_bytes)
                streams = [harness.stream(late=True), harness.stream()]
                for run in range(4):
                    harness.run(run // 2 % len(model.schedules), streams[run % 2], check=False)
                harness.check()
                harness.check_counters()
                with harness.late_copies():
                    for run in range(4):
                        harness.run(run // 2 % len(model.schedules), streams[1] if run % 2 else INLINE)


@scenario
def residents_are_in_place_before_a_run(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness, harness.late_copies():
        harness.install(model.full_bytes)
        harness.run()


@scenario
def after_install_the_ring_holds_poison(folder: Path) -> None:
    """Measuring the link copies weights to where runs will copy them: a copy that is missing then must show."""
    names = [f"w{i}" for i in range(6)]
    model = write_model(folder / "weights.ptd", [chain(*names)], dict.fromkeys(names, 2 * PAGE - 100))
    plan = model.plan(model.floor_bytes)
    fills = [
        model.content[fill.weight][fill.weight_offset_bytes :][: fill.nbytes][at : at + PAGE]
        for fill in plan.fills
        for at in range(0, fill.nbytes, PAGE)
    ]
    # The driver poisons nothing: all that is seen is the session's.
    with SoftDriver(PAGE, 0, poison=False) as driver, SessionHarness(model, driver=driver) as harness:
        for _ in range(2):
            with harness.late_copies():
                harness.install_plan(plan)
                assert harness.session.link() and not in_device_memory(streamed(model, plan))
                pages = device_pages()
                assert {page for page in pages if page != b"\xff" * PAGE} == {
                    fill + b"\xff" * (PAGE - len(fill)) for fill in fills
                }
            # On a stream that is gone when the next plan is installed.
            stream = driver.create_stream()
            harness.run(stream=stream)
            harness.session.drain()
            driver.destroy_stream(stream)


@scenario
def what_an_earlier_run_left_is_poison(folder: Path) -> None:
    """The same method again, after another or after a failure: what was copied ahead is no excuse for not copying."""
    model = _there_and_back(folder)
    with SoftDriver(PAGE, 0, poison=False) as driver, SessionHarness(model, driver=driver) as harness:
        plan = harness.install(model.floor_bytes)
        parts, ahead = streamed(model, plan), set(plan.methods[0].prologue)
        assert ahead
        harness.run()
        assert in_device_memory(parts) == ahead
        with harness.late_copies():
            harness.begin()
            # A warm run has what it starts from, until its last reader is done.
            assert in_device_memory(parts) == ahead
            harness.acquire(0)
            harness.done(0)
            assert in_device_memory(parts) == ahead - {plan.methods[0].prologue[0]}
            harness.acquire(1)
            # Whatever a run that failed has copied is gone.
            assert harness.session.abort() is None
            assert not in_device_memory(parts)
            harness._owner = None
            harness.run()
            harness.run(1)
            harness.begin()
            # The first access waits for its own copy, which stands behind the poison of all.
            harness.acquire(0)
            assert in_device_memory(parts) == {plan.methods[0].prologue[0]}
            assert harness.session.abort() is None
            harness._owner = None
        harness.run()


def _addresses(harness: SessionHarness) -> dict[int, int]:
    """Of every access of the first method, which is run."""
    addresses = {}
    harness.begin()
    for access in harness.model.schedules[0].accesses:
        addresses[access.number] = harness.acquire(access.number)
        harness.done(access.number)
    harness.end()
    return addresses


@scenario
def lru_pools_are_poisoned(folder: Path) -> None:
    """All of a new pool, what was measured with, and what is evicted: each is a call that can fail. The bytes cannot be
    looked at, because the soft pool itself gives none away that it has lent before."""
    model = _chain(folder)
    with SessionHarness(model, lru=True) as harness:
        for call in (1, 2):
            harness.driver.fail_at(call, call="fill")
            try:
                harness.install_lru(_lru_floor(model))
                raise AssertionError(f"fill {call} of an install was not made")
            except DriverCallError:
                pass
        harness.install_lru(_lru_floor(model))
        harness.driver.fail_at(1, call="fill")
        try:
            harness.run()
            raise AssertionError("what was evicted was not filled")
        except RunFailed:
            assert harness.driver.failed_call() == "fill"
        harness.check_hashes()
        # On a stream that is gone when the next pool is made.
        stream = harness.driver.create_stream()
        harness.run(stream=stream)
        harness.session.drain()
        harness.driver.destroy_stream(stream)
        harness.install_lru(_lru_floor(model))
        harness.run()


@scenario
def without_poison_nothing_is_filled(folder: Path) -> None:
    model = _chain(folder)
    for lru in (False, True):
        with SessionHarness(model, poison=False, lru=lru) as harness:
            harness.driver.fail_at(1, call="fill")
            if lru:
                harness.install_lru(_lru_floor(model))
            else:
                harness.install(model.floor_bytes)
            for _ in range(3):
                harness.run(check=False)
            uninstall(harness.session)
            assert not harness.driver.failed_call()
            harness.check()


@scenario
def the_link_is_measured(folder: Path) -> None:
    large = 2 * PART_BYTES
    for sizes in ({f"w{i}": 2 * PAGE for i in range(6)}, {f"w{i}": large for i in range(6)}):
        model = write_model(folder / "weights.ptd", [chain(*sizes)], sizes)
        for lru in (False, True):
            with SessionHarness(model, lru=lru) as harness:
                harness.driver.set_clock(0, TICK_NS)
                if lru:
                    harness.install_lru(_lru_floor(model))
                else:
                    harness.install(model.floor_bytes)
                samples = harness.session.link()
                assert all(sample.ns == sample.copies * TICK_NS for sample in samples)
                if harness.plan is not None:
                    pieces = [copy.piece.nbytes for copy in harness.plan.methods[0].copies]
                    assert (samples[0].copies, samples[0].nbytes) == (len(pieces), sum(pieces))
                    parts = max(pieces) // PART_BYTES
                else:
                    parts = sizes["w0"] // PART_BYTES
                # Of the largest copy, in parts.
                measured = [(sample.copies, sample.nbytes) for sample in samples[1:]]
                assert measured == [(parts, parts * PART_BYTES)] * (parts > 0)


@scenario
def runs_follow_one_another(folder: Path) -> None:
    model = _chain(folder)
    order: list[int] = []
    with SessionHarness(model) as harness:
        harness.install(model.full_bytes)
        streams = [harness.stream(late=True) for _ in range(3)]
        for run, stream in enumerate(streams):
            harness.begin(stream=stream)
            for _ in harness.steps(stream=stream):
                harness.driver.call(stream, lambda run=run: order.append(run))  # type: ignore[misc]
            harness.end()
        # The last is waited for, and nobody else.
        harness.driver.synchronize_stream(streams[-1])
        assert order == sorted(order) and len(order) == 18
        harness.check()


@scenario
def a_method_waits_for_the_last_one(folder: Path) -> None:
    for model in (models(folder)["methods"], _there_and_back(folder)):
        for poison in (True, False):
            with SessionHarness(model, poison=poison) as harness:
                harness.install(model.floor_bytes)
                streams = [harness.stream(late=True), harness.stream(late=True)]
                for run, method in enumerate((0, 1, 0, len(model.schedules) - 1)):
                    harness.run(method, streams[run % 2], check=False)
                assert harness.check() >= 24


@scenario
def what_a_method_copies_first_waits_for_the_last_one(folder: Path) -> None:
    """Into the page that the other method's last step reads; and that one has copied nothing ahead, which would have
    waited in its stead."""
    schedules = [chain("a", method="one"), chain("b", method="two")]
    model = write_model(folder / "weights.ptd", schedules, dict.fromkeys("ab", PAGE))
    methods = tuple(
        MethodPlan(
            schedule.method,
            (Placement(0, name, PAGE, number, 0, 0),),
            (Stay(name, PAGE, (0,), 0),),
            (Copy(0, Piece(name, 0, PAGE, number, 0), number, 0),),
            1,
        )
        for number, (schedule, name) in enumerate(zip(schedules, "ab", strict=True))
    )
    plan = Plan(PAGE, (Block(PAGE, ring=True),), (Range(PAGE, (0,)),) * 2, (), methods)
    check_plan(plan, schedules, model.weights)
    assert [bool(method.prologue) for method in methods] == [False, True]
    for poison in (True, False):
        with SessionHarness(model, poison=poison) as harness:
            harness.install_plan(plan)
            stream = harness.stream(late=True)
            for method in (0, 1):
                harness.run(method, stream, check=False)
            assert harness.check() == 2


@scenario
def staging_follows_the_method(folder: Path) -> None:
    model = models(folder)["methods"]
    with SessionHarness(model, source=staged()) as harness:
        harness.install(model.floor_bytes)
        for method in (0, 1, 0, 0, 2, 2):
            harness.run(method)


# ---- what is timed


@scenario
def stalls_are_what_was_waited_for(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model, poison=False) as harness:
        harness.install(model.floor_bytes)
        harness.driver.set_clock(0, TICK_NS)
        with harness.late_copies():
            # Each copy is waited for once, and made in that wait: those for the next run in the next.
            for run in range(1, 20):
                harness.run(check=False)
                last, total = harness.session.stats()
                assert last.stall_ns == 6 * TICK_NS
                assert total.stall_ns == run * 6 * TICK_NS
            # More runs than the meter has room for, and nobody asks in between.
            for _ in range(20):
                harness.run(check=False)
            assert harness.session.stats()[1].stall_ns == 39 * 6 * TICK_NS
            # What fails is not counted, and what could not be read is counted once.
            harness.begin()
            harness.acquire(0)
            with contextlib.suppress(RunFailed):
                harness.acquire(999)
            assert harness.session.stats()[1].stall_ns == 39 * 6 * TICK_NS
            harness.run(check=False)
            harness.driver.fail_at(3, call="elapsed_ns")
            try:
                harness.session.stats()
                raise AssertionError("the failed call went unnoticed")
            except PenstockError:
                pass
            last, again = harness.session.stats()
            assert last.stall_ns == 6 * TICK_NS and again.stall_ns == 40 * 6 * TICK_NS
        # A replay that is given up is no run, and the stalls of the run before it stay.
        captured = harness.capture()
        with harness.late_copies():
            harness.run(check=False)
            harness.session.begin_replay(captured.number, INLINE)
            assert harness.session.abort() is None
            harness._owner = None
            # What the run before had copied ahead had been drained.
            ahead = len(harness.plan.methods[0].prologue)
            assert 0 < ahead < 6 and harness.session.stats()[1].stall_ns == (40 * 6 + 6 - ahead) * TICK_NS
        harness.run()
        before, events = harness.session.stats()[1].stall_ns, harness.driver.counts().events
        stream = harness.stream(late=True)
        for _ in range(9):
            harness.run(stream=stream, check=False)
        # Copies that are early are not waited for; and the meter's events are used again.
        assert harness.session.stats()[0].stall_ns == 0 and harness.session.stats()[1].stall_ns == before
        assert harness.driver.counts().events == events
        # With everything late, asking waits for the run and no further.
        with harness.late_copies():
            harness.run(stream=stream, check=False)
            assert harness.session.stats()[0].stall_ns == (6 - ahead) * TICK_NS
        harness.check()


@scenario
def spans_are_what_ran(folder: Path) -> None:
    """On a clock of ticks, an hour after the trace began, and another hour between two runs."""
    hour_ns = 3600 * 10**9
    names = [f"w{i}" for i in range(6)]
    accesses = tuple(Access(i, name) for i, name in enumerate(names))
    # The fourth step reads what the third has fetched; the last has two kernels.
    steps_read = [(0,), (1,), (2,), (2,), (3,), (4, 5)]
    schedule = Schedule("forward", accesses, tuple(Step(f"k{i}", read) for i, read in enumerate(steps_read)))
    model = write_model(folder / "w", [schedule], dict.fromkeys(names, 2 * PAGE))
    kernels = [len(read) for read in steps_read]
    for lru in (False, True):
        with SessionHarness(model, lru=lru, poison=False) as harness:
            if lru:
                harness.install_lru(_lru_floor(model))
            else:
                harness.install(model.floor_bytes)
            harness.run(check=False)
            harness.driver.set_clock(12345, TICK_NS)
            harness.session.start_trace()
            counted_copies = counted_bytes = 0
            begins = []
            with harness.late_copies():
                for run in range(1, 4):
                    harness.driver.set_clock(12345 + run * hour_ns, TICK_NS)
                    begins.append(run * hour_ns)
                    harness.run(check=False)
                    last = harness.session.stats()[0]
                    counted_copies += last.copies
                    counted_bytes += last.bytes_streamed
                # A run that fails leaves what had ended.
                harness.begin()
                harness.acquire(0)
                with contextlib.suppress(RunFailed):
                    harness.acquire(999)
                harness._owner = None
                harness.run(check=False)
            spans = harness.session.stop_trace()
            steps = [span for span in spans if span.lane == "compute"]
            copies = [span for span in spans if span.lane == "copy"]
            assert [span.begin_ns for span in spans] == sorted(span.begin_ns for span in spans)
            # The run that failed is the fifth: its step had not ended.
            runs = {run: [span for span in steps if span.run == run] for run in (2, 3, 4, 6)}
            assert all([span.index for span in of_run] == [*range(6)] for of_run in runs.values())
            assert len(steps) == 24
            for span in steps:
                # To a float's step in an hour: the distance between runs is one measurement. Within a run all is exact.
                in_run = span.begin_ns - runs[span.run][0].begin_ns
                assert in_run % TICK_NS == 0 and span.end_ns - span.begin_ns == kernels[span.index] * TICK_NS, span
            for began_ns, of_run in zip(begins, runs.values(), strict=False):
                assert abs(of_run[0].begin_ns - began_ns) < 10**6
                # The fourth step fetches nothing: it begins where the third ended.
                assert of_run[3].begin_ns == of_run[2].end_ns
                assert all(one.end_ns <= other.begin_ns for one, other in itertools.pairwise(of_run))
            assert all(span.end_ns - span.begin_ns == TICK_NS for span in copies)
            whole = [span for span in copies if span.run < 5]
            assert len(whole) == counted_copies and sum(span.nbytes for span in whole) == counted_bytes
            # Nothing of two spans of one lane at once.
            assert all(one.end_ns <= other.begin_ns for one, other in itertools.pairwise(copies))


@scenario
def traces_wait_for_their_spans(folder: Path) -> None:
    """Every stream is late, and nothing has run when the trace is asked for; without copies too."""
    model = _chain(folder)
    for budget_bytes in (model.floor_bytes, model.full_bytes):
        with SessionHarness(model) as harness:
            harness.install(budget_bytes)
            stream = harness.stream(late=True)
            with harness.late_copies():
                harness.session.start_trace()
                harness.run(stream=stream, check=False)
                spans = harness.session.stop_trace()
            assert len(spans) == 6 + harness.last.copies
            harness.check()


# ---- failed runs


@scenario
def a_failed_run_is_waited_for(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream(late=True)
        harness.begin(stream=stream)
        address = harness.acquire(0)
        out = harness.driver.hash(stream, address, model.weights["w0"].nbytes)
        try:
            harness.acquire(999)
            raise AssertionError("a divergent access was served")
        except RunFailed:
            assert out.value == model.hashes["w0"], "the run was given up while its kernel was at work"
        harness.run(stream=stream)


@scenario
def copies_of_a_failed_run_have_ended(folder: Path) -> None:
    model = _chain(folder)
    # With poison, what a failed run has copied is overwritten; here it must be there as a whole.
    with SessionHarness(model, poison=False) as harness:
        plan = harness.install(model.floor_bytes)
        addresses = _addresses(harness)
        harness.session.begin(0, INLINE)
        assert harness.session.abort() is None
        method = plan.methods[0]
        prologue = [method.stays[method.copies[index].stay] for index in method.prologue]
        assert prologue
        # The ring is invalid now, so that the next run copies what it starts from.
        with harness.late_copies():
            harness.begin()
            try:
                harness.acquire(999)
            except RunFailed:
                for stay in prologue:
                    held = memory(addresses[stay.accesses[0]], model.weights[stay.weight].nbytes)
                    assert held == model.content[stay.weight], f"{stay.weight} was still on its way"
        harness._owner = None
        harness.run()


@scenario
def a_run_that_could_not_begin_leaves_the_last_one_alone(folder: Path) -> None:
    model = models(folder)["methods"]
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        slow, other = harness.stream(late=True), harness.stream()
        harness.run(0, slow, check=False)
        harness.driver.fail_at(1, call="wait")
        try:
            harness.begin(1, other)
            raise AssertionError("the failed call went unnoticed")
        except PenstockError:
            pass
        harness.run(1, other, check=False)
        harness.check()


@scenario
def after_a_failed_run_everything_is_copied_again(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        for position in (0, 1, 3, 5):
            harness.run()
            harness.begin()
            for access in range(position):
                harness.acquire(access)
                harness.done(access)
            with contextlib.suppress(RunFailed):
                harness.acquire(999)
            harness.run()
            assert harness.last == plan.methods[0].cold
            harness.run()
            assert harness.last == plan.methods[0].warm


@scenario
def after_a_refusal_nothing_is_lent(folder: Path) -> None:
    model = _chain(folder)
    for lru in (False, True):
        with SessionHarness(model, lru=lru) as harness:
            if lru:
                harness.install_lru(_lru_floor(model))
            else:
                harness.install(model.floor_bytes)
            address = ctypes.c_uint64()
            harness.begin()
            assert acquire(harness.session, 999, ctypes.byref(address))
            assert acquire(harness.session, 0, ctypes.byref(address)) and not address.value
            harness.done(0)
            harness.done(1)
            assert "expected access 0, got access 999" in str(refused(harness.session.end, ScheduleDivergedError))
            harness._owner = None
            harness.run()
            # To give up what is not under way changes nothing.
            assert harness.session.abort() is None
            harness.run()
            uninstall(harness.session)
            try:
                harness.session.begin(0, INLINE)
                raise AssertionError("a run was begun without a plan")
            except PenstockError:
                pass
            assert harness.session.memory()[0] == 0


@scenario
def what_cannot_be_read_is_told(folder: Path) -> None:
    """Of a file that was cut while it was used, through staging buffers."""
    model = _chain(folder)
    with SessionHarness(model, source=staged(PAGE, 2, 1)) as harness:
        harness.install(model.floor_bytes)
        harness.begin()
        with model.path.open("r+b") as file:
            file.truncate(0)
        refused(lambda: [*harness.steps()], WeightsChangedError)


@scenario
def weights_without_bytes(folder: Path) -> None:
    for schedule, sizes in ((chain("a", "b"), {"a": 0, "b": 0}), (chain("a", "b"), {"a": 0, "b": PAGE})):
        model = write_model(folder / "w", [schedule], sizes)
        with SessionHarness(model) as harness:
            harness.install(model.floor_bytes)
            for _ in range(2):
                harness.run()
        with SessionHarness(model, lru=True) as harness:
            harness.install_lru(2 * PAGE if sizes["b"] else 0)
            assert len(harness.session.link()) == bool(sizes["b"])
            for _ in range(2):
                harness.run()


@scenario
def what_is_read_in_place_is_counted(folder: Path) -> None:
    model = write_model(folder / "w", [chain("~t", "a", "b")], {"t": 2 * PAGE, "a": PAGE, "b": 3 * PAGE})
    planner = Planner(model.schedules, model.weights, page_bytes=PAGE, placement="auto")
    planned = planner.plan(planner.floor_bytes)
    assert planned.direct_weights == ("t",)
    with SessionHarness(model) as harness:
        harness.install_plan(planned)
        captured, stream = harness.capture(), harness.stream()
        for _ in range(2):
            harness.run()
            assert harness.last.bytes_in_place == 2 * PAGE
            harness.replay(captured, stream)
        assert harness.session.stats()[1].bytes_in_place == 8 * PAGE
    # A prefix of one page in device memory: the rest is read where it lies, by a kernel that knows of both.
    whole = planner.plan(planner.full_bytes)
    (method,) = whole.methods
    placements = [replace(one, prefix_bytes=PAGE) if one.weight == "b" else one for one in method.placements]
    with SessionHarness(model) as harness:
        harness.install_plan(replace(whole, methods=(replace(method, placements=tuple(placements)),)))
        _addresses(harness)
        harness.check_counters()
        assert harness.last.bytes_in_place == 2 * PAGE + (2 * PAGE if whole.direct_weights else 0)


# ---- draining and closing


@scenario
def draining_waits_for_kernels(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.full_bytes)
        harness.run(stream=harness.stream(late=True), check=False)
        harness.session.drain()
        assert harness.check_hashes() == 6, "drained while a kernel was at work"


@scenario
def draining_waits_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        with harness.late_copies():
            addresses = _addresses(harness)
            harness.session.drain()
            copy = plan.methods[0].copies[-1]
            last = plan.methods[0].stays[copy.stay]
            assert last.accesses[0] < copy.issue_before
            held = memory(addresses[last.accesses[0]], model.weights[last.weight].nbytes)
            assert held == model.content[last.weight], f"drained while {last.weight} was on its way"


@scenario
def closing_waits_for_kernels(folder: Path) -> None:
    model = _chain(folder)
    for poison in (True, False):
        with SessionHarness(model, poison=poison) as harness:
            harness.install(model.full_bytes)
            harness.run(stream=harness.stream(late=True), check=False)
            harness.session.close()
            assert harness.check_hashes() == 6, "closed while a kernel was at work"


@scenario
def closing_waits_for_copies(folder: Path) -> None:
    model = _chain(folder)
    # With poison the closing session waits for its own writes, and so for everything before them.
    with SessionHarness(model, poison=False) as harness:
        harness.install(model.floor_bytes)
        with harness.late_copies():
            harness.run(check=False)
            harness.session.close()


@scenario
def closing_in_a_run_waits_for_its_kernels(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream(late=True)
        harness.begin(stream=stream)
        out = harness.driver.hash(stream, harness.acquire(0), model.weights["w0"].nbytes)
        harness.session.close()
        assert out.value == model.hashes["w0"], "closed while a kernel was at work"


# ---- the least recently used


def _lru_floor(model: Model) -> int:
    from penstock.plan.floor import floor_bytes

    return floor_bytes(model.schedules, model.weights, granularity_bytes=PAGE).floor_bytes


@scenario
def lru_copies_wait_for_readers(folder: Path) -> None:
    model = _chain(folder)
    for poison in (True, False):
        with SessionHarness(model, lru=True, poison=poison) as harness:
            harness.install_lru(_lru_floor(model))
            stream = harness.stream(late=True)
            for _ in range(3):
                harness.run(stream=stream, check=False)
            assert harness.check() == 18


@scenario
def lru_kernels_wait_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(_lru_floor(model))
        with harness.late_copies():
            for _ in range(2):
                harness.run()


@scenario
def lru_waits_for_the_device_when_its_pool_refuses(folder: Path) -> None:
    """Releases that have completed make room in one piece; the soft pool needs none, so it is told to refuse."""
    model = _chain(folder)
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(_lru_floor(model))
        stream = harness.stream(late=True)
        with harness.late_copies():
            harness.begin(stream=stream)
            harness.driver.fail_at(2, call="pool_allocate")
            address = harness.acquire(0)  # the second allocation is that of the next access
            assert harness.driver.failed_call() == "pool_allocate"
            held = memory(address, model.weights["w0"].nbytes)
            assert held == model.content["w0"], "asked again while copies were at work"
            harness.session.abort()
        harness.run(stream=stream)


@scenario
def lru_tells_at_load_what_could_not_be_copied(folder: Path) -> None:
    model = write_model(folder / "w.ptd", [chain("a", "b", "!p")], {"a": 2 * PAGE, "b": 2 * PAGE, "p": PAGE})
    with SessionHarness(model, lru=True) as harness:
        with model.path.open("r+b") as file:
            file.truncate(4 * PAGE)
        try:
            harness.install_lru(8 * PAGE)
            raise AssertionError("a weight that is not in the file any more was loaded")
        except WeightsChangedError:
            pass


@scenario
def lru_of_many_shapes(folder: Path) -> None:
    """Methods that read in other orders, weights of other sizes, pinned ones: every stream late in its turn."""
    for model in models(folder).values():
        for budget_bytes in (_lru_floor(model), _lru_floor(model) + 3 * PAGE):
            with SessionHarness(model, lru=True) as harness:
                harness.install_lru(budget_bytes)
                streams = [harness.stream(late=True), harness.stream(late=True)]
                for run in range(4):
                    harness.run(run % len(model.schedules), streams[run % 2], check=False)
                harness.check()
                with harness.late_copies():
                    for run in range(4):
                        harness.run(run % len(model.schedules), streams[1] if run % 2 else INLINE)
                assert 0 < harness.session.memory()[0] <= budget_bytes
                peak_bytes = harness.session.memory()[1]
                assert 0 < peak_bytes <= budget_bytes
                uninstall(harness.session)
                assert harness.session.memory() == (0, peak_bytes)


@scenario
def lru_counts_and_evicts_the_least_recent(folder: Path) -> None:
    names = [f"w{i}" for i in range(6)]
    model = write_model(folder / "w", [chain("!p", *names)], {**dict.fromkeys(names, 2 * PAGE), "p": PAGE})
    weights_bytes = 12 * PAGE
    with SessionHarness(model, lru=True) as harness:
        # A cycle that does not fit misses every time, but for what is pinned.
        harness.install_lru(9 * PAGE)
        harness.run()
        assert harness.session.stats()[0].bytes_hit == PAGE
        for _ in range(2):
            harness.run()
        last, _ = harness.session.stats()
        assert (last.bytes_streamed, last.bytes_hit, last.copies) == (weights_bytes, PAGE, 6)
        # The link is measured with one of the largest.
        assert harness.session.link()[0].nbytes == 2 * PAGE
        # All that fits is copied once.
        harness.install_lru(13 * PAGE)
        for _ in range(2):
            harness.run()
        last, _ = harness.session.stats()
        assert (last.bytes_streamed, last.bytes_hit, last.copies) == (0, weights_bytes + PAGE, 0)
        # After a failure nothing that was held is trusted, nor counted as read; what is pinned stays.
        harness.begin()
        harness.acquire(0)
        harness.acquire(1)
        with contextlib.suppress(RunFailed):
            harness.acquire(999)
        harness.run()
        last, _ = harness.session.stats()
        assert (last.bytes_streamed, last.copies) == (weights_bytes, 6)
        assert harness.driver.counts().pool_allocations == 7


@scenario
def lru_tells_what_does_not_fit(folder: Path) -> None:
    model = write_model(folder / "w", [chain("a b", "c")], {"a": 3 * PAGE, "b": 2 * PAGE, "c": PAGE})
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(4 * PAGE)
        harness.begin()
        harness.acquire(0)
        refused(lambda: harness.acquire(1), DeviceMemoryError)
        harness.install_lru(5 * PAGE)
        harness.run()
        # A pool that refuses once, for want of memory and for another reason.
        harness.install_lru(5 * PAGE)
        harness.driver.fail_at(1, Failure.DEVICE_MEMORY, "pool_allocate")
        harness.run()
        assert harness.driver.failed_call() == "pool_allocate"
        harness.install_lru(5 * PAGE)
        harness.begin()
        harness.driver.fail_at(1, Failure.DRIVER, "pool_allocate")
        refused(lambda: harness.acquire(0), DriverCallError)
        harness.run()
    # And for good: the device's memory is somebody else's now.
    with SoftDriver(PAGE, 5 * PAGE, poison=True) as driver, SessionHarness(model, lru=True, driver=driver) as harness:
        harness.install_lru(5 * PAGE)
        hog = driver.create_block(5 * PAGE)
        harness.begin()
        refused(lambda: harness.acquire(0), DeviceMemoryError)
        driver.release_block(hog)
        harness.run()


@scenario
def lru_closing_waits_for_kernels(folder: Path) -> None:
    model = _chain(folder)
    for poison in (True, False):
        with SessionHarness(model, lru=True, poison=poison) as harness:
            harness.install_lru(model.file_bytes)
            harness.run(stream=harness.stream(late=True), check=False)
            harness.session.close()
            assert harness.check_hashes() == 6, "closed while a kernel was at work"


@scenario
def lru_gives_its_pool_back_before_it_makes_another(folder: Path) -> None:
    model = _chain(folder)
    budget = _lru_floor(model)
    with SoftDriver(PAGE, budget, poison=True) as driver:
        with SessionHarness(model, lru=True, driver=driver) as harness:
            harness.install_lru(budget)
            harness.run()
            with harness.late_copies():
                harness.install_lru(budget)
            harness.run()
            harness.check()


# ---- staging


@scenario
def buffers_wait_for_their_copies(folder: Path) -> None:
    model = _chain(folder)
    for source in (staged(PAGE, 1, 1), staged(PAGE, 3, 2)):
        with SessionHarness(model, source=source) as harness:
            harness.install(model.floor_bytes)
            with harness.late_copies():
                for _ in range(2):
                    harness.run()


class _Staging:
    """Staging by itself: one buffer of one page, a file of one page, and a stream that is late."""

    def __init__(self, folder: Path) -> None:
        self.content = bytes(range(256)) * (PAGE // 256)
        path = folder / "file"
        path.write_bytes(self.content)
        self.driver = SoftDriver(PAGE, 0, poison=True)
        self.stream = self.driver.create_stream()
        self.target = ctypes.create_string_buffer(PAGE)
        self._file, self._staging = ctypes.c_void_p(), ctypes.c_void_p()
        assert not testing().penstock_test_file_open(str(path).encode(), ctypes.byref(self._file))
        driver, page_bytes = ctypes.c_void_p(self.driver.handle), ctypes.c_int64(PAGE)
        made = testing().penstock_test_staging_create(driver, self._file, page_bytes, 1, 1, ctypes.byref(self._staging))
        assert not made
        self.driver.set_late(self.stream, True)

    def copy_next(self) -> int:
        extent = (ctypes.c_int64 * 2)(0, PAGE)
        one, none = ctypes.c_int64(1), ctypes.c_int64(0)
        assert not testing().penstock_test_staging_follow(self._staging, extent, one, None, none)
        return int(testing().penstock_test_staging_copy_next(self._staging, *self._where()))

    def copy_now(self) -> int:
        return int(testing().penstock_test_staging_copy_now(self._staging, *self._where()))

    def _where(self) -> tuple[ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p]:
        to = ctypes.c_uint64(ctypes.addressof(self.target))
        return ctypes.c_int64(0), ctypes.c_int64(PAGE), to, ctypes.c_void_p(self.stream)

    def destroy(self) -> None:
        testing().penstock_test_staging_destroy(self._staging)

    def finish(self) -> None:
        testing().penstock_test_file_close(self._file)
        self.driver.destroy_stream(self.stream)
        assert not self.driver.counts().alive()
        self.driver.close()


@scenario
def a_copy_without_an_event_is_waited_for(folder: Path) -> None:
    """The buffer is not to be filled again, nor given back, while it is read."""
    staging = _Staging(folder)
    staging.driver.fail_at(1, call="record")
    assert staging.copy_next()
    assert staging.target.raw == staging.content
    staging.destroy()
    staging.finish()


@scenario
def a_copy_outside_an_order_has_been_made_when_it_returns(folder: Path) -> None:
    staging = _Staging(folder)
    assert not staging.copy_now()
    assert staging.target.raw == staging.content
    staging.destroy()
    staging.finish()


@scenario
def buffers_are_kept_until_a_wait_succeeds(folder: Path) -> None:
    staging = _Staging(folder)
    assert not staging.copy_next()
    staging.driver.fail_at(1, call="synchronize_event")
    staging.destroy()
    assert staging.target.raw == staging.content
    staging.finish()


def play(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        SCENARIOS[name](Path(folder))


# ---- graphs (S9)


@scenario
def graph_copies_wait_for_readers(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        captured, stream = harness.capture(), harness.stream()
        for _ in range(2):
            harness.replay(captured, stream, order=COPIES_FIRST)


@scenario
def graph_kernels_wait_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        captured, stream = harness.capture(), harness.stream()
        for _ in range(2):
            harness.replay(captured, stream, order=KERNELS_FIRST)


def _there_and_back(folder: Path) -> Model:
    """Two methods: a run of the second leaves nothing in the ring that the first could take for its own."""
    names = [f"w{i}" for i in range(6)]
    schedules = [chain(*names), chain(*reversed(names), method="back")]
    return write_model(folder / "weights.ptd", schedules, dict.fromkeys(names, 4 * PAGE))


@scenario
def graph_kernels_wait_for_copies_made_before_it(folder: Path) -> None:
    model = _there_and_back(folder)
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        assert plan.methods[0].prologue
        captured, stream = harness.capture(), harness.stream()
        with harness.late_copies():
            harness.run(0, stream, check=False)
            harness.replay(captured, stream, order=KERNELS_FIRST)


@scenario
def a_graph_waits_for_the_only_copy_made_before_it(folder: Path) -> None:
    """No copy behind it is waited for in its stead: the others of this plan are all the graph's own."""
    model = _there_and_back(folder)
    with SessionHarness(model) as harness:
        plan = model.plan(model.floor_bytes)
        method = plan.methods[0]
        first, *others = (method.copies[copy] for copy in method.prologue)
        assert others and all(copy.stay > first.stay for copy in others)
        copies = [
            replace(copy, issue_before=method.stays[copy.stay].accesses[0]) if copy in others else copy
            for copy in method.copies
        ]
        copies.sort(key=lambda copy: copy.issue_before)
        alone = replace(method, copies=tuple(copies))
        harness.install_plan(replace(plan, methods=(alone, *plan.methods[1:])))
        assert [copies[copy].stay for copy in alone.prologue] == [first.stay]
        captured, stream = harness.capture(), harness.stream()
        with harness.late_copies():
            harness.run(0, stream, check=False)
            harness.replay(captured, stream, order=KERNELS_FIRST)


@scenario
def graph_copies_follow_those_made_before_it(folder: Path) -> None:
    """A weight with one copy in the graph and one before it: whoever waits for the last must have both."""
    model = _there_and_back(folder)
    with SessionHarness(model) as harness:
        plan = model.plan(model.floor_bytes)
        method = plan.methods[0]
        ahead = method.copies[method.prologue[0]]
        position = method.stays[ahead.stay].accesses[0]
        half = ahead.piece.nbytes // 2 // PAGE * PAGE
        second = replace(
            ahead.piece,
            nbytes=ahead.piece.nbytes - half,
            weight_offset_bytes=ahead.piece.weight_offset_bytes + half,
            range_offset_bytes=ahead.piece.range_offset_bytes + half,
        )
        copies = [
            replace(copy, piece=replace(copy.piece, nbytes=half)) if copy is ahead else copy for copy in method.copies
        ]
        copies.append(replace(ahead, piece=second, issue_before=position))
        copies.sort(key=lambda copy: copy.issue_before)
        halved = replace(method, copies=tuple(copies))
        harness.install_plan(replace(plan, methods=(halved, *plan.methods[1:])))
        assert any(copies[copy].piece.nbytes == half for copy in halved.prologue)
        captured, stream = harness.capture(), harness.stream()
        with harness.late_copies():
            harness.run(0, stream, check=False)
            harness.replay(captured, stream, order=COPIES_FIRST)


@scenario
def a_graph_follows_copies_made_for_another_method(folder: Path) -> None:
    """A run has copied ahead for its next one; the graph of another method copies to the same page, and waits for no
    kernel before it does. The copy that is late lands, if it may, between the graph's own and its reader."""
    schedules = [chain("a", "r", method="ahead"), chain("r", "b", method="other")]
    model = write_model(folder / "weights.ptd", schedules, dict.fromkeys("abr", PAGE))
    ahead = MethodPlan(
        "ahead",
        (Placement(0, "a", PAGE, 0, 0, 0), Placement(1, "r", PAGE, 2, 0, None)),
        (Stay("a", PAGE, (0,), 0),),
        (Copy(0, Piece("a", 0, PAGE, 0, 0), 2, 0),),
        2,
    )
    other = MethodPlan(
        "other",
        (Placement(0, "r", PAGE, 2, 0, None), Placement(1, "b", PAGE, 1, 0, 0)),
        (Stay("b", PAGE, (1,), 1),),
        (Copy(0, Piece("b", 0, PAGE, 1, 0), 1, 1),),
        2,
    )
    ranges = (Range(PAGE, (0,)), Range(PAGE, (0,)), Range(PAGE, (1,)))
    blocks = (Block(PAGE, ring=True), Block(PAGE, ring=False))
    plan = Plan(PAGE, blocks, ranges, (Piece("r", 0, PAGE, 2, 0),), (ahead, other))
    check_plan(plan, schedules, model.weights)
    with SessionHarness(model, poison=False) as harness:
        harness.install_plan(plan)
        copies, stream, captures_on = copy_stream(harness.session), harness.stream(), harness.stream()
        inside, landed = threading.Event(), threading.Event()

        def wait_inside() -> None:
            inside.set()
            landed.wait()

        def hold_the_reader(step: int) -> None:
            if step == 0:
                harness.driver.call(captures_on, wait_inside)

        captured = harness.capture(1, captures_on, after_step=hold_the_reader)
        harness.driver.set_late(copies, True)
        harness.run(0, stream, check=False)
        harness.driver.call(copies, landed.set)  # behind what the run has copied for its next
        harness.replay(captured, stream, order=COPIES_FIRST, check=False)
        inside.wait()
        harness.driver.set_late(copies, False)
        harness.check()


@scenario
def copies_behind_a_graph_wait_for_its_readers(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        assert plan.methods[0].prologue
        stream = harness.stream(late=True)
        captured = harness.capture()
        harness.run(stream=stream)
        for _ in range(2):
            harness.replay(captured, stream, order=KERNELS_FIRST, check=False)
        harness.check()


@scenario
def graphs_of_many_shapes(folder: Path) -> None:
    """Runs and replays in turn, cold and warm ones, with every stream late in its turn."""
    for model in models(folder).values():
        for budget_bytes in (model.floor_bytes, model.floor_bytes + 2 * PAGE, model.full_bytes):
            with SessionHarness(model) as harness:
                harness.install(budget_bytes)
                stream, late = harness.stream(), harness.stream(late=True)
                harness.run(stream=stream)
                harness.capture()
                graphs = [harness.capture(method) for method in range(len(model.schedules))]
                for order in (COPIES_FIRST, KERNELS_FIRST):
                    for number in (0, 0, *range(len(graphs)), 0):
                        harness.replay(graphs[number], stream, order=order)
                        harness.replay(graphs[number], late, order=order, check=False)
                        harness.replay(graphs[number], late, order=order, check=False)
                        harness.check()
                        harness.run(number, late, check=False)
                        harness.replay(graphs[number], late, order=order, check=False)
                        harness.check()
                        harness.check_counters()
                        with harness.late_copies():
                            harness.replay(graphs[(number + 1) % len(graphs)], stream, order=order)
                            harness.replay(graphs[number], stream, order=order)
                            harness.run(number, stream)
                            harness.replay(graphs[number], stream, order=order)
                harness.session.drop_capture(graphs[0].number)
                harness.run(stream=stream)


@scenario
def a_capture_that_fails_changes_nothing(folder: Path) -> None:
    model = _chain(folder)
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream, side = harness.stream(), harness.stream()
        harness.run(stream=stream)
        before = harness.session.stats()[0]

        def untouched() -> None:
            assert harness.session.stats()[0] == before and not harness.driver.is_capturing(side)
            # Warm: what was copied ahead still is.
            harness.run(stream=stream)

        for call in ("begin_capture", "create_event", "record", "end_capture"):
            harness.driver.fail_at(1, call=call)
            try:
                harness.capture(0, side)
                raise AssertionError(f"a failed {call} went unnoticed")
            except (PenstockError, RunFailed):
                pass
            before = replace(before, stall_ns=harness.session.stats()[0].stall_ns)
            untouched()
            before = harness.session.stats()[0]
        harness.session.begin_capture(0, side)
        assert acquire(harness.session, 7, ctypes.byref(ctypes.c_uint64()))
        assert isinstance(harness.session.abort(), ScheduleDivergedError)
        untouched()
        captured = harness.capture(0, side)
        for _ in range(2):
            harness.replay(captured, stream)


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or SCENARIOS:
            play(name)
    except (AssertionError, PenstockError, RunFailed, DriverFailure) as error:
        sys.exit(f"{type(error).__name__}: {error}")
