"""Scenarios of experts in slots: streams that run late on purpose, runs that fail wherever they can, graphs in hostile
orders. Rows are compared with the file, hits and misses with a cache of the tests' own (expert_harness.py).

S11: an entry of a table counts only after its fill is complete, in the order of the stream; a failed run empties the
table; what the device has counted is what was filled; and results are the same whatever lies in slots.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.errors import DriverCallError, PenstockError, ScheduleDivergedError
from penstock.plan.plan import MethodPlan
from penstock.runtime.records import plan_numbers
from tests.experts.reference import ReferenceTable
from tests.native.session import acquire, take_rows, uninstall
from tests.runtime.expert_harness import (
    EXPERTS,
    ROW_BYTES,
    ExpertHarness,
    ExpertModel,
    layers,
    schedule_of,
    write_experts,
)
from tests.runtime.scenario_tools import (
    COPIES_FIRST,
    KERNELS_FIRST,
    in_device_memory,
    refused,
    scenario,
)
from tests.runtime.session_harness import INLINE, PAGE, RunFailed
from tests.runtime.soft import SoftDriver

AT_RANDOM, THREADS = 2, 3
ORDERS = (COPIES_FIRST, KERNELS_FIRST, AT_RANDOM, THREADS)


def _slots() -> list[tuple[int, int]]:
    """Fewer than a call asks for, one, about half, all but one, and one for each."""
    return [(1, 2), (2, 1), (5, 3), (15, 9), (16, 16)]


def _indices(experts: int) -> list[list[int]]:
    """What a call may ask for: one, the same again, from the end, every one, far more rows than slots."""
    draw = random.Random(7)
    found = [
        [0],
        [experts - 1],
        [-1],
        [-experts],
        [3 % experts] * 5,
        [1 % experts, -1, 1 % experts, 0],
        [*range(experts)],
    ]
    found += [[*reversed(range(-experts, 0))], [draw.randrange(-experts, experts) for _ in range(3 * experts)]]
    return [*found, *([draw.randrange(experts)] for _ in range(6)), *found]


# ---- what is taken


@scenario
def experts_are_those_of_their_index(folder: Path) -> None:
    model = layers(folder)
    for slots, poison in itertools.product(_slots(), (True, False)):
        with ExpertHarness(model, poison=poison) as harness:
            harness.install_plan(model.with_slots(*slots))
            streams = [INLINE, harness.stream(), harness.stream(late=True)]
            for number, index in enumerate(_indices(EXPERTS)):
                harness.ask = lambda routing, index=index: index  # type: ignore[misc]
                harness.run(number % 2, streams[number % 3])


@scenario
def banks_of_every_size(folder: Path) -> None:
    """One expert, and as many as a table may have; rows as many as a move carries."""
    for experts in (1, 2, 4096):
        shapes = {"a": (experts, 16), "b": (experts, 48)}
        schedule = schedule_of("forward", [("a", 0), ("b", 0)])
        model = write_experts(folder / f"{experts}.ptd", [schedule], {**shapes, "w": (PAGE,)})
        for slots in sorted({1, max(1, experts - 1), experts} if experts < 4096 else {1, experts}):
            with ExpertHarness(model, rows=60) as harness:
                harness.install_plan(model.with_slots(slots))
                stream = harness.stream()
                for _ in range(3):
                    harness.run(stream=stream)
                harness.ask = lambda routing, experts=experts: [one % experts for one in range(4096)]  # type: ignore[misc]
                harness.run(stream=stream)


@scenario
def a_call_takes_as_many_rows_as_there_are(folder: Path) -> None:
    """More than one move carries: slots that the first has filled, and experts that only the last asks for. And none,
    of which the last run has counted nothing."""
    shapes = {"a": (EXPERTS, 16), "b": (EXPERTS, 48), "w": (PAGE,)}
    model = write_experts(folder / "w.ptd", [schedule_of("forward", [("a", 0), ("b", 0)])], shapes)
    first, draw = [3, 0, 3], random.Random(4)
    many = [[0] * 4097, [*[1] * 4096, 2, 1], [draw.randrange(-EXPERTS, EXPERTS) for _ in range(9000)]]
    for slots in (1, 5, EXPERTS):
        with ExpertHarness(model) as harness:
            harness.install_plan(model.with_slots(slots))
            stream = harness.stream(late=True)
            for index in (first, *many, [], first, []):
                harness.ask = lambda routing, index=index: index  # type: ignore[misc]
                graph = harness.capture()
                harness.run(stream=stream)
                harness.replay(graph, stream)
            assert harness.session.stats()[0].expert_hits == harness.session.stats()[0].expert_misses == 0


@scenario
def what_no_expert_is_asked_for_by_is_refused(folder: Path) -> None:
    """Before anything is chosen; and so is what was not fetched, or has no slots."""
    model = layers(folder)
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(3, 0))
        stream = harness.stream()
        harness.run(stream=stream)
        drawn = harness.ask
        for index, message in (
            ([EXPERTS], f"index {EXPERTS} is out of range for {EXPERTS} experts"),
            ([0, -EXPERTS - 1], f"index {-EXPERTS - 1} is out of range for {EXPERTS} experts"),
        ):
            harness.ask = lambda routing, index=index: index  # type: ignore[misc]
            _refused(lambda: harness.run(check=False), message)
            harness.ask = drawn
            harness.run(stream=stream)
        for number, message in ((1, "was multiplied with before it was fetched"), (5, "has no slots")):
            harness.begin(stream=stream)
            for access in model.schedules[0].accesses[: 6 if number == 5 else 0]:
                harness.acquire(access.number)
                harness.done(access.number)
            one, out = (ctypes.c_int64 * 1)(0), (ctypes.c_ubyte * ROW_BYTES[0])()
            assert take_rows(harness.session, number, one, out)
            _refused(harness._give_up, message)
            harness.run(stream=stream)
        # Once in a run: the second time, experts would be hits whose slots other weights have not filled yet.
        harness.begin(stream=stream)
        harness.acquire(0)
        harness.done(0)
        harness.acquire(1)
        access = model.schedules[0].accesses[1]
        harness.take(access, stream)
        _refused(lambda: harness.take(access, stream), "access 1 asks for experts twice in a run")
        harness.run(stream=stream)


def _refused(run: Callable[[], object], message: str) -> None:
    text = ""
    try:
        run()
    except (DriverCallError, RunFailed) as failed:
        text = str(failed)
    assert message in text, text


@scenario
def hits_are_read_in_their_slots(folder: Path) -> None:
    """Other bytes come into the file while it is mapped, and it looks unchanged: what is in slots is what was there,
    and what is not is what there is now."""
    shapes = {"a": (EXPERTS, 512), "b": (EXPERTS, 1040), "w": (PAGE,)}
    model = write_experts(folder / "w.ptd", [schedule_of("forward", [("a", 0), ("w", None), ("b", 0)])], shapes)
    asked = [1, 3, 3, 5]
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(4))
        stream = harness.stream()
        harness.ask = lambda routing: asked
        harness.run(stream=stream)
        before = model.path.stat()
        later = dict(model.content)
        with model.path.open("r+b") as file:
            for name in ("a", "b"):
                later[name] = bytes(byte ^ 0x55 for byte in model.content[name])
                file.seek(model.offsets[name])
                file.write(later[name])
        os.utime(model.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        harness.run(stream=stream)  # all of them are in slots
        assert harness.session.stats()[0].expert_misses == 0
        model.content.update(later)
        asked = [2]
        harness.run(stream=stream)  # that one is not, and is put there
        assert harness.session.stats()[0].expert_hits == 0
        harness.run(stream=stream)
        assert harness.session.stats()[0].expert_misses == 0


# ---- the order of runs


@scenario
def runs_with_experts_follow_one_another(folder: Path) -> None:
    """On streams that all are late, of two methods in turn: nothing has run when the last is asked for."""
    model = layers(folder)
    for slots, poison in itertools.product(_slots(), (True, False)):
        with ExpertHarness(model, poison=poison, seed=slots[0]) as harness:
            harness.install_plan(model.with_slots(*slots))
            streams = [harness.stream(late=True) for _ in range(3)]
            for _ in range(3):
                for number, stream in enumerate(streams):
                    harness.run(number % 2, stream, check=False)
                    harness.run(number // 2, stream, check=False)
                harness.check()
                harness.check_counters()
            with harness.late_copies():
                for number in range(6):
                    harness.run(number % 2, streams[number % 3], check=False)
                harness.check()
                harness.check_counters()


@scenario
def an_expert_that_was_replaced_is_read_until_then(folder: Path) -> None:
    """One slot, and each call wants another expert: what the kernel before it reads is overwritten behind it."""
    model = layers(folder, count=1)
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(1))
        asked = itertools.cycle([[2], [2, 7], [7], [7], [9, 2]])
        harness.ask = lambda routing: next(asked)
        streams = [harness.stream(late=True), harness.stream()]
        for number in range(20):
            harness.run(number % 2, streams[number // 2 % 2], check=False)
        harness.check()
        harness.check_counters()


# ---- plans


@scenario
def tables_begin_empty(folder: Path) -> None:
    """Also where the memory of a new plan is poisoned late, and where the plan before it has used its table."""
    model = layers(folder)
    plans = [model.with_slots(*slots) for slots in ((3, 2), (16, 0), (0, 5), (0, 0), (4, 4))]
    for driver_poison, poison in itertools.product((True, False), (True, False)):
        with (
            SoftDriver(PAGE, 0, poison=driver_poison) as driver,
            ExpertHarness(model, driver=driver, poison=poison) as harness,
        ):
            streams = itertools.cycle([harness.stream(late=True), harness.stream(late=True)])
            for plan in [*plans, *reversed(plans)]:
                with harness.late_copies():
                    harness.install_plan(plan)
                # On another stream than the run before it, of the other plan.
                stream = next(streams)
                for number in range(4):
                    harness.run(number // 2, stream, check=False)
                harness.check()
                harness.check_counters()
                harness.install_plan(plan)
                assert harness.session.expert_counts() == [(0, 0, 0)] * len(plan.banks)
                harness.run(stream=stream, check=False)
            uninstall(harness.session)
            assert harness.session.expert_counts() == []


@scenario
def a_bank_that_nobody_reads_is_empty(folder: Path) -> None:
    """No planner makes one, and the core has nothing against it: what it counts is nothing."""
    model = layers(folder)
    plan = model.with_slots(3, 2)

    def unread(method: MethodPlan) -> MethodPlan:
        placements = (replace(placed, bank=None, chooses=False) for placed in method.placements)
        return replace(method, placements=tuple(placements))

    with ExpertHarness(model) as harness:
        harness.install_plan(replace(plan, methods=tuple(map(unread, plan.methods))))
        assert harness.session.expert_counts() == [(0, 0, 0)] * 2
        harness.run()


@scenario
def slots_hold_poison_until_they_are_filled(folder: Path) -> None:
    """After an install and after a failed run: so that what an earlier run has left is never right by luck."""
    model = layers(folder)
    with SoftDriver(PAGE, 0, poison=False) as driver:
        for poison in (True, False):
            with ExpertHarness(model, driver=driver, poison=poison) as harness:
                stream = harness.stream(late=True)
                harness.install_plan(model.with_slots(16, 16))
                harness.ask = lambda routing: range(EXPERTS)
                experts = _experts(model)
                assert not in_device_memory(experts)
                harness.run(stream=stream)
                assert in_device_memory(experts) == set(experts)
                harness.begin(stream=stream)
                harness.give_up()
                assert bool(in_device_memory(experts)) is not poison
                harness.run(stream=stream)
                assert harness.session.stats()[0].expert_hits == 0


def _experts(model: ExpertModel) -> dict[int, bytes]:
    """Each expert of all weights that have some."""
    found = [
        model.content[name][at : at + weight.row_bytes]
        for name, weight in model.weights.items()
        if len(weight.shape) > 1
        for at in range(0, weight.nbytes, weight.row_bytes)
    ]
    return dict(enumerate(found))


# ---- runs that fail


@scenario
def a_run_with_experts_may_be_given_up_anywhere(folder: Path) -> None:
    """After any of its calls, while everything before it is still to be done: what was chosen and not filled is
    forgotten, and the next run, of any method, on any stream, is right and finds nothing."""
    model = layers(folder)
    for poison in (True, False):
        with ExpertHarness(model, poison=poison) as harness:
            harness.install_plan(model.with_slots(4, 3))
            streams = [harness.stream(late=True), harness.stream()]
            for method in (0, 1):
                for steps in range(len(model.schedules[method].accesses) + 1):
                    for half in (False, True):
                        harness.run(method, streams[0], check=False)
                        _run_until(harness, method, streams[steps % 2], steps, half=half)
                        harness.give_up()
                        harness.check()
                        harness.run(1 - method if half else method, streams[half])
                        harness.run(method, streams[half])


def _run_until(harness: ExpertHarness, method: int, stream: int, steps: int, *, half: bool) -> None:
    """So many steps; `half`: of the last only its launches, and not that they have ended."""
    harness.begin(method, stream)
    told = harness.steps(method, stream)
    for _ in range(steps):
        next(told)
    if not half and steps:
        harness.done(steps - 1)


@scenario
def a_choice_without_its_fill_is_forgotten(folder: Path) -> None:
    """Chosen, and never moved; moved for one weight of the bank, and not for the other."""
    model = layers(folder, count=1)
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(3))
        for stream in (INLINE, harness.stream(), harness.stream(late=True)):
            for call, n in (("choose_experts", 1), ("move_experts", 1), ("move_experts", 2)):
                harness.run(stream=stream, check=False)
                harness.run(stream=stream, check=False)
                harness.fails(lambda stream=stream: harness.run(stream=stream, check=False), call, n)  # type: ignore[misc]
                harness.check()
                for method in (0, 1, 0):
                    harness.run(method, stream)


@scenario
def every_call_of_a_run_with_experts_may_fail(folder: Path) -> None:
    model = layers(folder)
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(2, 2))
        stream = harness.stream()
        seen = set()
        for n in itertools.count(1):
            harness.run(stream=stream, check=False)
            harness.driver.fail_at(n)
            try:
                harness.run(stream=stream, check=False)
                harness.driver.fail_at(0)
                break
            except (DriverCallError, RunFailed) as error:
                if "a test asked for this failure" not in str(error):
                    raise
            seen.add(harness.driver.failed_call())
            harness.driver.fail_at(0)
            harness.check()
            harness.run(stream=stream)
        assert seen >= {"choose_experts", "move_experts", "wait", "record", "copy_to_device"}, seen


@scenario
def tables_are_empty_before_the_next_run(folder: Path) -> None:
    """Also where they are emptied late, and the next run asks for experts before it waits for any copy."""
    model = layers(folder)
    for poison in (True, False):
        with ExpertHarness(model, poison=poison) as harness:
            harness.install_plan(model.with_slots(3, 3))
            for stream in (INLINE, harness.stream(), harness.stream(late=True)):
                harness.ask = lambda routing: [4, 9]
                harness.run(stream=stream)
                with harness.late_copies():
                    # The last layer's are chosen, and not filled.
                    _run_until(harness, 0, stream, 6, half=True)
                    harness.give_up()
                    # That layer's by two indices: were the first found and the second not, the sums would be the same.
                    harness.ask = lambda routing: [2] if routing == 1 else [4, 9]
                    harness.run(1, stream)


@scenario
def tables_that_could_not_be_emptied_are_before_the_next_run(folder: Path) -> None:
    """The call that empties the first, or the second, fails while the run is given up; and again when the next begins,
    which is then none."""
    model = layers(folder)
    for n, poison in itertools.product((1, 2), (True, False)):
        with ExpertHarness(model, poison=poison) as harness:
            harness.install_plan(model.with_slots(3, 3))
            stream = harness.stream()
            # What is chosen last, and not filled, is what the next run asks for first.
            index = [4, 9]
            harness.ask = lambda routing, index=index: index  # type: ignore[misc]
            graph = harness.capture(0)
            for again in range(3):
                _run_until(harness, 0, stream, 5, half=True)
                harness.driver.fail_at(n, call="fill")
                harness.give_up()
                assert harness.driver.failed_call() == "fill"
                harness.driver.fail_at(0)
                if again == 1:
                    harness.fails(lambda stream=stream: harness.run(stream=stream, check=False), "fill", n)  # type: ignore[misc]
                # A method that asks for experts before it waits for any copy.
                with harness.late_copies():
                    if again == 2:
                        harness.replay(graph, stream)
                    else:
                        harness.run(1, stream)
                assert harness.session.stats()[0].expert_hits == (0 if again == 2 else len(index))
                harness.run(again != 2, stream)
                assert harness.session.stats()[0].expert_misses == 0


@scenario
def what_was_counted_is_kept(folder: Path) -> None:
    """By failed runs and by other plans; and the last run's counts are those of its own method's banks."""
    shapes = {"a": (EXPERTS, 512), "b": (EXPERTS, 1040)}
    schedules = [schedule_of("one", [("a", 0)]), schedule_of("two", [("b", 0)])]
    model = write_experts(folder / "w.ptd", schedules, shapes)
    with ExpertHarness(model) as harness:
        stream = harness.stream(late=True)
        for slots in ((3, 2), (0, 2), (0, 0), (3, 0), (2, 2)):
            harness.install_plan(model.with_slots(*slots, names=["a", "b"]))
            for method in (0, 0, 1, 0, 1, 1):
                harness.run(method, stream)
            harness.begin(0, stream)
            harness.give_up()
            assert harness.session.stats()[0].expert_hits == 0
            harness.check_experts()
            harness.run(1, stream)
        # An install that is refused, or that cannot read what was counted, changes nothing.
        numbers = plan_numbers(model.with_slots(4, 4), model.weights)
        refused(lambda: harness.session.install((ctypes.c_int64 * 2)(8, 1)), PenstockError)
        harness.driver.fail_at(1, call="copy_to_host")
        refused(lambda: harness.session.install(numbers), DriverCallError)
        harness.driver.fail_at(0)
        for method in (0, 1):
            harness.run(method, stream)


@scenario
def counts_wait_for_what_they_count(folder: Path) -> None:
    """Every stream is late, and nothing has run when they are asked for."""
    model = layers(folder)
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(3, 3))
        streams = [harness.stream(late=True), harness.stream(late=True)]
        with harness.late_copies():
            for number in range(12):
                harness.run(number % 2, streams[number // 2 % 2], check=False)
                if number % 3 == 0:
                    harness.check_experts()
                else:
                    harness.check_counters()
            harness.check()


@scenario
def a_count_that_nobody_waited_for_comes_into_memory_that_is_there(folder: Path) -> None:
    """Waiting for it fails, and the copy is made afterwards: a sanitizer would see where to."""
    with ExpertHarness(layers(folder)) as harness:
        harness.install_plan(harness.model.with_slots(3, 3))
        harness.run(0)
        session = harness.session
        reads: list[Callable[[], object]] = [
            session.expert_counts,
            lambda: session.expert_hits(1, [1, 3]),
            session.stats,
        ]
        for read in reads:
            known = read()
            with harness.late_copies():
                # The first waits for what is counted.
                harness.driver.fail_at(2, call="synchronize_stream")
                refused(read, DriverCallError)
                harness.driver.fail_at(0)
                assert read() == known
        harness.run(1)


@scenario
def kernels_are_loaded_with_a_plan_that_needs_them(folder: Path) -> None:
    """And with no other: a plan that holds every expert takes none."""
    model = layers(folder)
    whole = model.plan(model.full_bytes)
    assert not whole.direct_weights
    with ExpertHarness(model) as harness:
        for plan, is_needed in ((whole, False), (model.with_slots(0, 0), True), (model.with_slots(0, 2), True)):
            harness.driver.fail_at(1, call="prepare_experts")
            try:
                harness.install_plan(plan)
                assert not is_needed
                harness.run()
            except DriverCallError:
                assert is_needed and harness.driver.failed_call() == "prepare_experts"
                harness.plan, harness.tables = None, []
            harness.driver.fail_at(0)
        harness.install_plan(plan)
        harness.run()


# ---- graphs (S9, S11)


@scenario
def graphs_with_experts(folder: Path) -> None:
    """Replays of two methods in every order of their nodes, each with another index; runs that are none between them;
    and streams that are late in turn."""
    model = layers(folder)
    for slots, poison in itertools.product(_slots(), (True, False)):
        with ExpertHarness(model, poison=poison, seed=slots[0]) as harness:
            harness.install_plan(model.with_slots(*slots))
            streams = [harness.stream(), harness.stream(late=True)]
            graphs = [harness.capture(method) for method in (0, 1, 0)]
            choose = random.Random(slots[1])
            for number in range(40):
                stream = streams[choose.randrange(2)]
                if choose.random() < 0.3:
                    harness.run(choose.randrange(2), stream, check=False)
                else:
                    order = ORDERS[number % 4]
                    harness.replay(choose.choice(graphs), stream, order=order, seed=number + 1, check=False)
                if choose.random() < 0.2:
                    harness.check()
                    harness.check_counters()
            with harness.late_copies():
                for number in range(8):
                    harness.replay(graphs[number % 3], streams[number // 4], order=ORDERS[number % 4], check=False)
                harness.check()
            harness.check_counters()


@scenario
def a_replay_that_fails_empties_the_tables(folder: Path) -> None:
    model = layers(folder)
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(4, 4))
        stream = harness.stream()
        graph = harness.capture(0)
        harness.ask = lambda routing: [1, 2, 1]
        for n in itertools.count(1):
            harness.replay(graph, stream)
            harness.driver.fail_at(n)
            try:
                harness.replay(graph, stream, check=False)
                harness.driver.fail_at(0)
                break
            except DriverCallError:
                was_begun = harness.driver.failed_call() != "is_capturing"
            harness.driver.fail_at(0)
            harness.check()
            harness.replay(graph, stream)
            assert (harness.session.stats()[0].expert_hits == 0) == was_begun
        assert n > 4


@scenario
def a_capture_with_experts_changes_no_table(folder: Path) -> None:
    """Whether it is made, given up, or a call of it fails: the next run finds what the last has left."""
    model = layers(folder)
    with ExpertHarness(model) as harness:
        harness.install_plan(model.with_slots(4, 4))
        stream, side = harness.stream(), harness.stream()
        harness.ask = lambda routing: [3, 0, 3]
        harness.run(stream=stream)

        def untouched() -> None:
            harness.run(stream=stream)
            assert harness.session.stats()[0].expert_misses == 0

        untouched()
        for call in ("begin_capture", "choose_experts", "move_experts", "record", "end_capture"):
            harness.driver.fail_at(1, call=call)
            try:
                harness.capture(0, side)
                raise AssertionError(f"a failed {call} went unnoticed")
            except (PenstockError, RunFailed):
                assert harness.driver.failed_call() == call
            harness.driver.fail_at(0)
            untouched()
        harness.session.begin_capture(0, side)
        assert acquire(harness.session, 7, ctypes.byref(ctypes.c_uint64()))
        assert isinstance(harness.session.abort(), ScheduleDivergedError)
        untouched()
        graph = harness.capture(0, side)
        untouched()
        for order in ORDERS:
            harness.replay(graph, stream, order=order)
            assert harness.session.stats()[0].expert_misses == 0


@scenario
def a_graph_goes_with_its_slots(folder: Path) -> None:
    """Another plan has other slots, and another table: graphs of the one before it are refused."""
    model = layers(folder)
    with ExpertHarness(model) as harness:
        stream = harness.stream()
        for slots in ((3, 4), (4, 3), (3, 0)):
            harness.install_plan(model.with_slots(*slots))
            graph = harness.capture(0)
            for _ in range(3):
                harness.replay(graph, stream)
            harness.session.drop_capture(graph.number)
            error = refused(lambda graph=graph: harness.session.begin_replay(graph.number, stream), PenstockError)  # type: ignore[misc]
            assert "there is no capture" in str(error)
            harness.run(stream=stream)


# ---- what was logged


@scenario
def logs_tell_what_other_numbers_of_slots_would_have_held(folder: Path) -> None:
    """Of the last 256 calls, the first quarter of which warms up; as a cache that was asked the same would have. A call
    may ask for a few experts or for most of them. A failed run empties the log."""
    for experts, rows in ((EXPERTS, 3), (40, 60)):
        model = layers(folder, experts=experts, count=1)
        draw = random.Random(3)
        with ExpertHarness(model) as harness:
            harness.install_plan(model.with_slots(4))
            calls: list[list[int]] = []
            stream = harness.stream(late=True)

            def ask(
                routing: int,
                calls: list[list[int]] = calls,
                draw: random.Random = draw,
                experts: int = experts,
                rows: int = rows,
            ) -> Sequence[int]:
                calls.append([draw.choice([0, 1, 2, 3, draw.randrange(experts)]) for _ in range(rows)])
                return calls[-1]

            harness.ask = ask
            wanted = [1, 2, 4, experts // 2, experts]
            for runs in (0, 1, 3, 60, 250, 0):
                for _ in range(runs):
                    harness.run(0, stream, check=False)
                # Nothing of it has run.
                with harness.late_copies():
                    assert harness.session.expert_hits(0, wanted) == [_played(calls[-256:], experts, n) for n in wanted]
                harness.check()
                if len(calls) > 256:
                    harness.begin(0, stream)
                    harness.give_up()
                    calls.clear()
            for slots in (0, experts + 1):
                assert "has no" in str(
                    refused(lambda slots=slots: harness.session.expert_hits(0, [slots]), PenstockError)  # type: ignore[misc]
                )
            for bank in (-1, 1):
                assert "there is no bank" in str(
                    refused(lambda bank=bank: harness.session.expert_hits(bank, [1]), PenstockError)  # type: ignore[misc]
                )


def _played(calls: Sequence[Sequence[int]], experts: int, slots: int) -> tuple[int, int, int]:
    """Hits, uses and calls, but for those of the first quarter."""
    table, hits, uses, warm = ReferenceTable(experts, slots), 0, 0, len(calls) // 4
    for number, call in enumerate(calls):
        found, missed = table.take(call)
        if number >= warm:
            hits += found
            uses += found + missed
    return hits, uses, len(calls) - warm
