"""Graphs of the soft driver: captured as CUDA does it, refused what CUDA refuses, run as hostile as the edges allow."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.soft import INLINE, DriverFailure, Failure, SoftDriver, hash_of
from tests.runtime.test_soft_driver import PAGE, Gate, buffer, memory, read, refused, truncated_source

COPIES_FIRST, KERNELS_FIRST, RANDOM, THREADS = ORDERS = range(4)
OLD, NEW = b"\1" * PAGE, b"\2" * PAGE


@pytest.fixture
def driver() -> Iterator[SoftDriver]:
    with SoftDriver() as soft:
        yield soft


def then(driver: SoftDriver, before: int, after: int) -> None:
    """What comes next in one stream waits for what the other has now; in a capture that forks or joins."""
    event = driver.create_event(False)
    driver.record(event, before)
    driver.wait(after, event)
    driver.destroy_event(event)


@dataclass(frozen=True)
class Capture:
    """A stream that is being captured, and one forked from it."""

    driver: SoftDriver
    main: int
    side: int

    def end(self) -> int:
        then(self.driver, self.side, self.main)
        return int(self.driver.end_capture(self.main))


def begin(driver: SoftDriver) -> Capture:
    main, side = driver.create_stream(), driver.create_stream()
    driver.begin_capture(main)
    then(driver, main, side)
    return Capture(driver, main, side)


def launch(driver: SoftDriver, graph: int, stream: int | None, order: int = 0, seed: int = 1) -> None:
    driver.launch_graph(graph, stream, order, seed)
    driver.synchronize_stream(stream)


# Capture


def test_nothing_runs_while_capturing_and_every_launch_runs_it_anew(driver: SoftDriver) -> None:
    stream, address, source, order = driver.create_stream(), memory(driver, PAGE), buffer(OLD), []
    driver.fill(address, 9, PAGE, INLINE)
    driver.begin_capture(stream)
    driver.copy_to_device(address, source, PAGE, stream)
    out, back = driver.hash(stream, address, PAGE), ctypes.create_string_buffer(PAGE)
    driver.call(stream, lambda: order.append("kernel"))
    driver.copy_to_host(back, address, PAGE, stream)
    driver.fill(address, 7, PAGE, stream)
    assert driver.is_capturing(stream) == 1
    graph = driver.end_capture(stream)
    assert driver.is_capturing(stream) == 0
    driver.synchronize_stream(stream)
    assert (order, out.value, read(driver, address, 1)) == ([], 0, b"\x09")
    for run, data in enumerate((OLD, NEW), 1):
        source.raw = data
        launch(driver, graph, stream)
        assert (out.value, back.raw, len(order)) == (hash_of(data), data, run)
        assert read(driver, address, PAGE) == b"\7" * PAGE


@pytest.mark.parametrize("order", ORDERS)
def test_a_captured_stream_keeps_its_order(driver: SoftDriver, order: int) -> None:
    stream, address, seen = driver.create_stream(), memory(driver, PAGE), []
    driver.begin_capture(stream)
    for value in range(8):
        driver.fill(address, value, PAGE, stream)
        driver.call(stream, lambda: seen.append(ctypes.string_at(address, 1)[0]))
    graph = driver.end_capture(stream)
    for seed in range(5):
        launch(driver, graph, stream, order, seed)
    assert seen == list(range(8)) * 5


@pytest.mark.parametrize("order", ORDERS)
def test_a_launch_is_one_piece_of_work_of_its_stream(driver: SoftDriver, order: int) -> None:
    captured, seen = begin(driver), []
    for stream in (captured.main, captured.side):
        driver.launch_sleep(stream, 1_000_000)
        driver.call(stream, lambda: seen.append("node"))
    graph, stream = captured.end(), driver.create_stream()
    gate = Gate(driver, stream)
    driver.call(stream, lambda: seen.append("before"))
    driver.launch_graph(graph, stream, order)
    driver.call(stream, lambda: seen.append("between"))
    driver.launch_graph(graph, stream, order)
    driver.call(stream, lambda: seen.append("after"))
    # The stream that was captured has nothing to do with the launch.
    driver.synchronize_stream(captured.main)
    assert seen == []
    gate.open()
    driver.synchronize_stream(stream)
    assert seen == ["before", "node", "node", "between", "node", "node", "after"]


def test_a_launch_on_the_calling_thread_is_done_when_it_returns(driver: SoftDriver) -> None:
    captured, seen, event = begin(driver), [], driver.create_event(False)
    driver.call(captured.side, lambda: seen.append(threading.get_ident()))
    driver.record_external(event, captured.side)
    graph = captured.end()
    driver.launch_graph(graph, INLINE)
    assert seen == [threading.get_ident()] and driver.is_complete(event) == 1


def test_a_stream_that_waits_for_a_captured_one_is_captured_until_the_end(driver: SoftDriver) -> None:
    captured, third, seen = begin(driver), driver.create_stream(), []
    then(driver, captured.side, third)
    streams = (captured.main, captured.side, third)
    assert [driver.is_capturing(stream) for stream in streams] == [1, 1, 1]
    for stream in streams:
        driver.call(stream, lambda: seen.append("captured"))
    then(driver, third, captured.side)
    graph = captured.end()
    assert [driver.is_capturing(stream) for stream in streams] == [0, 0, 0]
    for stream in streams:
        driver.call(stream, lambda: seen.append("eager"))
        driver.synchronize_stream(stream)
    assert seen == ["eager"] * 3
    launch(driver, graph, third)
    assert seen[3:] == ["captured"] * 3


def test_a_graph_without_nodes_is_nothing_to_do(driver: SoftDriver) -> None:
    captured = begin(driver)
    graph = captured.end()
    for order in ORDERS:
        launch(driver, graph, captured.main, order)


# Edges


def pair(driver: SoftDriver, first: str, *, edge: bool, order: int, seed: int = 1) -> bool:
    """Whether a kernel hashed the right bytes, with a copy over them captured before or after it."""
    captured, address, source, out = begin(driver), memory(driver, PAGE), buffer(NEW), ctypes.c_uint64()

    def copy() -> None:
        driver.copy_to_device(address, source, PAGE, captured.side)

    def kernel() -> None:
        driver.launch_hash(captured.main, address, PAGE, ctypes.byref(out), 0)

    if first == "kernel":
        kernel()
        if edge:
            then(driver, captured.main, captured.side)
        copy()
    else:
        copy()
        if edge:
            then(driver, captured.side, captured.main)
        kernel()
    graph = captured.end()
    driver.fill(address, OLD[0], PAGE, INLINE)
    launch(driver, graph, captured.main, order, seed)
    assert read(driver, address, PAGE) == NEW
    return out.value == hash_of(OLD if first == "kernel" else NEW)


@pytest.mark.parametrize(("first", "wrong"), [("kernel", COPIES_FIRST), ("copy", KERNELS_FIRST)])
def test_an_unordered_pair_is_wrong_in_one_of_the_orders(driver: SoftDriver, first: str, wrong: int) -> None:
    right = {order: pair(driver, first, edge=False, order=order) for order in (COPIES_FIRST, KERNELS_FIRST)}
    assert right == {wrong: False, 1 - wrong: True}
    assert {pair(driver, first, edge=False, order=RANDOM, seed=seed) for seed in range(12)} == {False, True}


@pytest.mark.parametrize("first", ["kernel", "copy"])
@pytest.mark.parametrize("order", ORDERS)
def test_an_ordered_pair_is_right_in_all_orders(driver: SoftDriver, first: str, order: int) -> None:
    driver.set_delays(7, 100_000)
    assert all(pair(driver, first, edge=True, order=order, seed=seed) for seed in range(12))


def test_a_wait_is_for_what_had_been_captured_at_the_record(driver: SoftDriver) -> None:
    captured, address, source = begin(driver), memory(driver, PAGE), buffer(NEW)
    before = driver.hash(captured.main, address, PAGE)
    event = driver.create_event(False)
    driver.record(event, captured.main)
    after = driver.hash(captured.main, address, PAGE)
    driver.wait(captured.side, event)
    driver.copy_to_device(address, source, PAGE, captured.side)
    graph = captured.end()
    driver.fill(address, OLD[0], PAGE, INLINE)
    launch(driver, graph, captured.main, COPIES_FIRST)
    assert (before.value, after.value) == (hash_of(OLD), hash_of(NEW))


def test_of_two_copies_without_an_edge_the_one_captured_last_runs_first(driver: SoftDriver) -> None:
    captured, address = begin(driver), memory(driver, PAGE)
    driver.fill(address, 1, PAGE, captured.main)
    driver.fill(address, 2, PAGE, captured.side)
    graph = captured.end()
    for order in (COPIES_FIRST, KERNELS_FIRST):
        launch(driver, graph, captured.main, order)
        assert read(driver, address, 1) == b"\1"


def test_a_seed_draws_one_order(driver: SoftDriver) -> None:
    main, sides = driver.create_stream(), [driver.create_stream() for _ in range(5)]
    seen: list[int] = []
    driver.begin_capture(main)
    for number, side in enumerate(sides):
        then(driver, main, side)
        driver.call(side, functools.partial(seen.append, number))
    for side in sides:
        then(driver, side, main)
    graph = driver.end_capture(main)

    def drawn(seed: int) -> tuple[int, ...]:
        seen.clear()
        launch(driver, graph, main, RANDOM, seed)
        return tuple(seen)

    orders = [drawn(seed) for seed in range(20)]
    assert orders == [drawn(seed) for seed in range(20)]
    assert len(set(orders)) > 10 and all(sorted(order) == list(range(5)) for order in orders)


def test_threads_run_nodes_at_once(driver: SoftDriver) -> None:
    captured, meeting, met = begin(driver), threading.Barrier(2), []
    for stream in (captured.main, captured.side):
        # Far beyond any test; alone, a node would break the barrier.
        driver.call(stream, lambda: met.append(meeting.wait(60)))
    graph = captured.end()
    launch(driver, graph, captured.main, THREADS)
    assert sorted(met) == [0, 1]


def ring_mismatches(driver: SoftDriver, order: int, seed: int, missing: str) -> int:
    """Copies run ahead of readers through two slots, in one graph; the waits for one of the streams may be missing."""
    captured = begin(driver)
    reader, copier = captured.main, captured.side
    sources = [buffer(bytes([number + 1]) * PAGE) for number in range(8)]
    slots = [memory(driver, PAGE) for _ in range(2)]
    ready, free = ([driver.create_event(False) for _ in slots] for _ in range(2))
    hashes = []
    for number, source in enumerate(sources):
        at = number % 2
        if number >= 2 and missing != "reader":
            driver.wait(copier, free[at])
        driver.copy_to_device(slots[at], source, PAGE, copier)
        driver.record(ready[at], copier)
        if missing != "copier":
            driver.wait(reader, ready[at])
        hashes.append(driver.hash(reader, slots[at], PAGE))
        driver.record(free[at], reader)
    graph = captured.end()
    for _ in range(2):
        driver.launch_graph(graph, reader, order, seed)
    driver.synchronize_stream(reader)
    return sum(out.value != hash_of(source.raw) for out, source in zip(hashes, sources, strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_a_captured_ring_with_its_waits_is_right(driver: SoftDriver, order: int) -> None:
    driver.set_delays(3, 20_000)
    assert [ring_mismatches(driver, order, seed, missing="") for seed in range(4)] == [0] * 4


@pytest.mark.parametrize(("missing", "wrong"), [("reader", COPIES_FIRST), ("copier", KERNELS_FIRST)])
def test_a_captured_ring_without_some_of_its_waits_reads_wrong_bytes(
    driver: SoftDriver, missing: str, wrong: int
) -> None:
    assert ring_mismatches(driver, wrong, 1, missing) >= 6


# External events


@pytest.mark.parametrize("order", ORDERS)
def test_an_external_record_is_of_the_launch_from_its_call_on(driver: SoftDriver, order: int) -> None:
    captured, event, seen = begin(driver), driver.create_event(False), []
    driver.call(captured.side, lambda: seen.append("node"))
    driver.record_external(event, captured.side)
    # Capturing it records nothing.
    assert driver.is_complete(event) == 1
    graph, stream, other = captured.end(), driver.create_stream(), driver.create_stream()
    driver.record(event, INLINE)
    for _ in range(2):
        gate = Gate(driver, stream)
        driver.launch_graph(graph, stream, order)
        assert driver.is_complete(event) == 0
        driver.wait(other, event)
        driver.call(other, lambda: seen.append("after"))
        gate.open()
        driver.synchronize_stream(other)
        driver.synchronize_event(event)
    assert seen == ["node", "after"] * 2


def test_an_external_record_does_not_wait_for_the_rest_of_the_graph(driver: SoftDriver) -> None:
    stream, event, held, seen = driver.create_stream(), driver.create_event(False), threading.Event(), []
    driver.begin_capture(stream)
    driver.record_external(event, stream)
    driver.call(stream, lambda: seen.append(held.wait(60)))
    graph = driver.end_capture(stream)
    for order in ORDERS:
        driver.launch_graph(graph, stream, order)
        driver.synchronize_event(event)
        held.set()
        driver.synchronize_stream(stream)
        held.clear()
    assert seen == [True] * 4


def test_two_launches_record_apart(driver: SoftDriver) -> None:
    captured, event = begin(driver), driver.create_event(False)
    driver.record_external(event, captured.main)
    graph = captured.end()
    streams, observers = [driver.create_stream() for _ in range(2)], [driver.create_stream() for _ in range(2)]
    gates, reached = [Gate(driver, stream) for stream in streams], [driver.create_event(False) for _ in streams]
    for stream, observer, done in zip(streams, observers, reached, strict=True):
        driver.launch_graph(graph, stream)
        driver.wait(observer, event)
        driver.record(done, observer)
    gates[1].open()
    driver.synchronize_stream(observers[1])
    assert [driver.is_complete(done) for done in (*reached, event)] == [0, 1, 1]
    gates[0].open()
    driver.synchronize_stream(observers[0])


@pytest.mark.parametrize("order", ORDERS)
def test_an_external_wait_is_for_the_recording_before_the_launch_and_no_later_one(
    driver: SoftDriver, order: int
) -> None:
    captured, event, seen = begin(driver), driver.create_event(False), []
    driver.wait_external(captured.side, event)
    driver.call(captured.side, lambda: seen.append("node"))
    graph, main, side = captured.end(), captured.main, captured.side
    # Never recorded, and recorded only behind the launch: no wait.
    first, late = Gate(driver, main), Gate(driver, side)
    driver.launch_graph(graph, main, order)
    driver.record(event, side)
    first.open()
    driver.synchronize_stream(main)
    assert seen == ["node"]
    # Two launches, each for the recording it found.
    third, other, done = driver.create_stream(), driver.create_stream(), driver.create_event(False)
    driver.launch_graph(graph, main, order)
    driver.record(done, main)
    soon = Gate(driver, third)
    driver.record(event, third)
    driver.launch_graph(graph, other, order)
    soon.open()
    driver.synchronize_stream(other)
    assert (driver.is_complete(done), seen) == (0, ["node"] * 2)
    late.open()
    driver.synchronize_stream(main)
    assert seen == ["node"] * 3


@pytest.mark.parametrize("order", ORDERS)
def test_an_external_wait_keeps_back_nothing_but_its_followers(driver: SoftDriver, order: int) -> None:
    captured, event, seen = begin(driver), driver.create_event(False), []
    others = [driver.create_stream() for _ in range(3)]
    for stream in (captured.main, *others):
        if stream != captured.main:
            then(driver, captured.main, stream)
        driver.wait_external(stream, event)
        driver.call(stream, lambda: seen.append("follower"))
    for stream in others:
        then(driver, stream, captured.main)
    recorder = driver.create_stream()
    gate = Gate(driver, recorder)
    driver.record(event, recorder)
    # The only one to open the gate: behind any of the waits it would never run.
    driver.call(captured.side, lambda: seen.append("opener"))
    driver.call(captured.side, gate.open)
    graph = captured.end()
    launch(driver, graph, captured.main, order)
    assert seen == ["opener"] + ["follower"] * 4


@pytest.mark.parametrize("order", ORDERS)
def test_a_wait_and_a_record_of_one_event_chain_launches(driver: SoftDriver, order: int) -> None:
    captured, event, seen = begin(driver), driver.create_event(False), []
    driver.wait_external(captured.main, event)
    driver.launch_sleep(captured.main, 100_000)
    driver.call(captured.main, lambda: seen.append("node"))
    driver.record_external(event, captured.main)
    graph, streams, done = captured.end(), [captured.main, captured.side], driver.create_event(False)
    gate = Gate(driver, streams[0])
    for run in range(6):
        driver.launch_graph(graph, streams[run % 2], order)
    driver.record(done, streams[1])
    assert (driver.is_complete(done), seen) == (0, [])
    gate.open()
    driver.synchronize_event(done)
    assert len(seen) == 6


def test_external_events_are_ordinary_in_a_stream_that_is_not_captured(driver: SoftDriver) -> None:
    first, second, event, seen = driver.create_stream(), driver.create_stream(), driver.create_event(False), []
    driver.wait_external(second, event)
    gate = Gate(driver, first)
    driver.call(first, lambda: seen.append("first"))
    driver.record_external(event, first)
    driver.wait_external(second, event)
    driver.call(second, lambda: seen.append("second"))
    assert driver.is_complete(event) == 0
    gate.open()
    driver.synchronize_stream(second)
    driver.wait_external(INLINE, event)
    assert seen == ["first", "second"]


def test_time_between_external_records(driver: SoftDriver) -> None:
    stream, start, stop = driver.create_stream(), driver.create_event(True), driver.create_event(True)
    driver.begin_capture(stream)
    driver.record_external(start, stream)
    driver.launch_sleep(stream, 0)
    driver.record_external(stop, stream)
    driver.set_clock(7, 1500)
    launch(driver, driver.end_capture(stream), stream)
    assert driver.elapsed_ns(start, stop) == 1500


# What is refused


@dataclass(frozen=True)
class Scene:
    """A capture in which one thing is done that may not be, and what else that needs."""

    capture: Capture
    inside: int  # an event recorded in the capture
    outside: int
    ended: int  # recorded in a capture that has ended
    pool: int
    lent: int
    graph: int


def scene(driver: SoftDriver) -> Scene:
    inside, outside, ended = (driver.create_event(True) for _ in range(3))
    pool, stream = driver.create_pool(2 * PAGE), driver.create_stream()
    driver.begin_capture(stream)
    driver.record(ended, stream)
    graph = driver.end_capture(stream)
    driver.destroy_stream(stream)
    lent = driver.pool_allocate(pool, PAGE, INLINE)
    driver.record(outside, INLINE)
    captured = begin(driver)
    driver.launch_sleep(captured.main, 0)
    driver.record(inside, captured.main)
    return Scene(captured, inside, outside, ended, pool, lent, graph)


Act = Callable[[SoftDriver, Scene], object]
REFUSED: dict[str, tuple[Act, str]] = {
    "an event from outside": (lambda d, s: d.wait(s.capture.main, s.outside), "not recorded in its capture"),
    "an event from outside, forked": (lambda d, s: d.wait(s.capture.side, s.outside), "not recorded in its capture"),
    "an event never recorded": (lambda d, s: d.wait(s.capture.main, d.create_event(False)), "not recorded in its"),
    "an event of an ended capture": (lambda d, s: d.wait(s.capture.main, s.ended), "capture that has ended"),
    "the calling thread waits": (lambda d, s: d.wait(INLINE, s.inside), "calling thread as a stream may not"),
    "synchronize_stream": (lambda d, s: d.synchronize_stream(s.capture.main), "synchronize_stream on a stream being"),
    "synchronize_stream, forked": (lambda d, s: d.synchronize_stream(s.capture.side), "on a stream being captured"),
    "synchronize_event": (lambda d, s: d.synchronize_event(s.inside), "last recorded in a capture"),
    "is_complete": (lambda d, s: d.is_complete(s.inside), "last recorded in a capture"),
    "elapsed_ns": (lambda d, s: d.elapsed_ns(s.outside, s.inside), "last recorded in a capture"),
    "pool_allocate": (lambda d, s: d.pool_allocate(s.pool, PAGE, s.capture.main), "pool_allocate on a stream being"),
    "pool_release": (lambda d, s: d.pool_release(s.pool, s.lent, s.capture.side), "pool_release on a stream being"),
    "launch_graph": (lambda d, s: d.launch_graph(s.graph, s.capture.main), "launch_graph on a stream being captured"),
    "begin_capture": (lambda d, s: d.begin_capture(s.capture.main), "being captured already"),
    "begin_capture, forked": (lambda d, s: d.begin_capture(s.capture.side), "being captured already"),
    "end_capture, forked": (lambda d, s: d.end_capture(s.capture.side), "began on another stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_act_invalidates_the_capture(driver: SoftDriver, name: str) -> None:
    (act, pattern), at, seen = REFUSED[name], scene(driver), []
    main, side, third = at.capture.main, at.capture.side, driver.create_stream()
    with refused(Failure.CAPTURE, pattern):
        act(driver, at)
    later: list[Callable[[], object]] = [
        lambda: driver.launch_sleep(main, 0),
        lambda: driver.record(at.outside, side),
        lambda: driver.record_external(at.outside, main),
        lambda: driver.wait(side, at.inside),
        lambda: driver.wait(third, at.inside),
    ]
    for attempt in later:
        with refused(Failure.CAPTURE, "capture was invalidated: "):
            attempt()
    assert [driver.is_capturing(stream) for stream in (main, side, third)] == [1, 1, 0]
    with refused(Failure.CAPTURE, "end_capture failed: the capture was invalidated: "):
        driver.end_capture(main)
    # Nothing of it is left, and its streams are ordinary again.
    assert [driver.is_capturing(stream) for stream in (main, side)] == [0, 0]
    with refused(Failure.CAPTURE, "stream is not being captured"):
        driver.end_capture(main)
    for stream in (main, side):
        driver.call(stream, lambda: seen.append("eager"))
        driver.synchronize_stream(stream)
    assert seen == ["eager"] * 2 and driver.counts().graphs == 1
    driver.pool_release(at.pool, at.lent, INLINE)
    driver.begin_capture(main)
    driver.destroy_graph(driver.end_capture(main))


def test_a_wait_across_two_captures_invalidates_both(driver: SoftDriver) -> None:
    one, other, event = begin(driver), begin(driver), driver.create_event(False)
    driver.record(event, one.side)
    with refused(Failure.CAPTURE, "recorded in another capture"):
        driver.wait(other.main, event)
    for captured in (one, other):
        with refused(Failure.CAPTURE, "capture was invalidated"):
            driver.end_capture(captured.main)


def test_two_captures_at_once_are_two_graphs(driver: SoftDriver) -> None:
    captures = [begin(driver) for _ in range(2)]
    seen: list[int] = []
    for number, captured in enumerate(captures):
        driver.call(captured.side, functools.partial(seen.append, number))
    for number, captured in enumerate(captures):
        launch(driver, captured.end(), captured.main)
        assert seen == list(range(number + 1))


def test_a_forked_stream_must_be_joined(driver: SoftDriver) -> None:
    captured = begin(driver)
    driver.launch_sleep(captured.side, 0)
    then(driver, captured.side, captured.main)
    driver.launch_sleep(captured.side, 0)
    driver.launch_sleep(captured.main, 0)
    with refused(Failure.CAPTURE, "does not wait for node 1 of 3"):
        driver.end_capture(captured.main)
    assert [driver.is_capturing(stream) for stream in (captured.main, captured.side)] == [0, 0]
    assert driver.counts().graphs == 0
    # Joined through a third stream, and one that did nothing.
    again, third = begin(driver), driver.create_stream()
    driver.launch_sleep(again.side, 0)
    then(driver, again.side, third)
    driver.launch_sleep(third, 0)
    then(driver, third, again.main)
    then(driver, again.main, third)
    driver.destroy_graph(driver.end_capture(again.main))


def test_the_calling_thread_cannot_be_captured(driver: SoftDriver) -> None:
    with refused(Failure.CAPTURE, "calling thread as a stream cannot be captured"):
        driver.begin_capture(INLINE)


def test_an_event_of_an_ended_capture_is_of_no_use_until_it_is_recorded_again(driver: SoftDriver) -> None:
    stream, event, other = driver.create_stream(), driver.create_event(True), driver.create_event(True)
    driver.record(other, INLINE)
    driver.record(event, INLINE)
    driver.begin_capture(stream)
    driver.record(event, stream)
    driver.end_capture(stream)
    uses: list[Callable[[], object]] = [
        lambda: driver.wait(stream, event),
        lambda: driver.wait_external(stream, event),
        lambda: driver.wait(INLINE, event),
        lambda: driver.synchronize_event(event),
        lambda: driver.is_complete(event),
        lambda: driver.elapsed_ns(other, event),
    ]
    for use in uses:
        with refused(Failure.CAPTURE, "last recorded in a capture"):
            use()
    driver.synchronize_stream(stream)
    driver.record(event, stream)
    driver.synchronize_event(event)
    for use in uses:
        use()


def test_a_launch_is_refused_whole_when_a_wait_of_it_can_never_end(driver: SoftDriver) -> None:
    captured, waited, recorded, seen = begin(driver), driver.create_event(False), driver.create_event(False), []
    driver.record_external(recorded, captured.main)
    driver.wait_external(captured.main, waited)
    driver.call(captured.main, lambda: seen.append("node"))
    graph = captured.end()
    gate = Gate(driver, captured.side)
    driver.record(recorded, captured.side)
    driver.begin_capture(captured.main)
    driver.record(waited, captured.main)
    driver.end_capture(captured.main)
    with refused(Failure.CAPTURE, "last recorded in a capture"):
        driver.launch_graph(graph, captured.main)
    driver.synchronize_stream(captured.main)
    assert (driver.is_complete(recorded), seen) == (0, [])
    gate.open()


def test_a_destroyed_stream_takes_its_capture_along(driver: SoftDriver) -> None:
    captured, seen = begin(driver), []
    driver.destroy_stream(captured.side)
    with refused(Failure.CAPTURE, "a stream of the capture was destroyed"):
        driver.end_capture(captured.main)
    captured = begin(driver)
    driver.destroy_stream(captured.main)
    assert driver.is_capturing(captured.side) == 0
    driver.call(captured.side, lambda: seen.append("eager"))
    driver.synchronize_stream(captured.side)
    assert seen == ["eager"]


# Faults


@pytest.mark.parametrize("order", ORDERS)
def test_a_fault_in_a_graph_reaches_everyone_who_waits_for_it(driver: SoftDriver, tmp_path: Path, order: int) -> None:
    source = truncated_source(tmp_path)
    start = ctypes.addressof(ctypes.c_char.from_buffer(source))
    captured, address, event, seen = begin(driver), memory(driver, 2 * PAGE), driver.create_event(False), []
    driver.call(captured.main, lambda: seen.append("before"))
    driver.copy_to_device(address, start, 2 * PAGE, captured.main)
    driver.call(captured.main, lambda: seen.append("skipped"))
    driver.record_external(event, captured.main)
    graph = captured.end()
    stream, second, waiting = (driver.create_stream() for _ in range(3))
    for _ in range(2):
        driver.launch_graph(graph, stream, order)
        driver.call(stream, lambda: seen.append("skipped"))
        driver.wait(second, event)
        observers: list[Callable[[], object]] = [
            lambda: driver.synchronize_event(event),
            lambda: driver.is_complete(event),
            lambda: driver.wait(INLINE, event),
            lambda: driver.synchronize_stream(stream),
            lambda: driver.synchronize_stream(second),
        ]
        for observe in observers:
            with refused(Failure.HOST_READ, f"source of {2 * PAGE} bytes could not be read"):
                observe()
    # The second launch found its stream failed and ran nothing.
    assert seen == ["before"]
    with refused(Failure.HOST_READ, "could not be read"):
        driver.launch_graph(graph, INLINE, order)
    # And through an external wait into another graph.
    driver.begin_capture(waiting)
    driver.wait_external(waiting, event)
    driver.call(waiting, lambda: seen.append("skipped"))
    follower = driver.end_capture(waiting)
    driver.launch_graph(follower, waiting, order)
    with refused(Failure.HOST_READ, "could not be read"):
        driver.synchronize_stream(waiting)
    assert seen == ["before"] * 2
    # What was captured is sound: elsewhere, with a source that can be read, it runs.
    with (tmp_path / "weights").open("r+b") as file:
        file.truncate(2 * PAGE)
    seen.clear()
    launch(driver, graph, captured.main, order)
    assert seen == ["before", "skipped"] and driver.is_complete(event) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_a_failed_launch_still_waits_for_what_it_should(driver: SoftDriver, tmp_path: Path, order: int) -> None:
    source = truncated_source(tmp_path)
    start = ctypes.addressof(ctypes.c_char.from_buffer(source))
    captured, address, event, done = (
        begin(driver),
        memory(driver, 2 * PAGE),
        *(driver.create_event(False) for _ in "12"),
    )
    driver.copy_to_device(address, start, 2 * PAGE, captured.main)
    driver.wait_external(captured.main, event)
    driver.record_external(done, captured.main)
    graph = captured.end()
    gate = Gate(driver, captured.side)
    driver.record(event, captured.side)
    driver.launch_graph(graph, captured.main, order)
    assert driver.is_complete(done) == 0
    gate.open()
    with refused(Failure.HOST_READ, "could not be read"):
        driver.synchronize_event(done)


# Calls and counts


def test_graphs_are_counted_and_live_until_their_last_launch(driver: SoftDriver) -> None:
    captured, seen = begin(driver), []
    driver.call(captured.side, lambda: seen.append("node"))
    graph = captured.end()
    assert driver.counts().alive() == {"streams": 2, "graphs": 1}
    gate = Gate(driver, captured.main)
    for _ in range(3):
        driver.launch_graph(graph, captured.main)
    driver.destroy_graph(graph)
    assert driver.counts().graphs == 0
    for use in (driver.destroy_graph, lambda graph: driver.launch_graph(graph, captured.main)):
        with refused(Failure.DRIVER, "there is no such graph"):
            use(graph)
    gate.open()
    driver.synchronize_stream(captured.main)
    assert seen == ["node"] * 3
    for stream in (captured.main, captured.side):
        driver.destroy_stream(stream)
    assert driver.counts().alive() == {}


def test_there_are_four_orders(driver: SoftDriver) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    graph = driver.end_capture(stream)
    for order in (-1, 4):
        with refused(Failure.DRIVER, f"there is no order {order}, only 0 to 3"):
            driver.launch_graph(graph, stream, order)


def test_events_may_be_destroyed_behind_a_capture(driver: SoftDriver) -> None:
    captured, event, seen = begin(driver), driver.create_event(False), []
    driver.wait_external(captured.main, event)
    driver.call(captured.main, lambda: seen.append("node"))
    driver.record_external(event, captured.main)
    driver.destroy_event(event)
    graph = captured.end()
    for order in ORDERS:
        launch(driver, graph, captured.main, order)
    assert len(seen) == 4


@pytest.mark.parametrize(
    "call", ["record", "wait", "record_external", "wait_external", "copy_to_device", "copy_to_host", "fill"]
)
def test_a_call_that_fails_captures_nothing_and_spoils_nothing(driver: SoftDriver, call: str) -> None:
    captured, address, source, out = begin(driver), memory(driver, PAGE), buffer(NEW), buffer(OLD)
    event, external = driver.create_event(False), driver.create_event(False)
    driver.record(event, captured.side)
    driver.record(external, INLINE)
    calls: dict[str, Callable[[], object]] = {
        "record": lambda: driver.record(external, captured.main),
        "wait": lambda: driver.wait(captured.main, event),
        "record_external": lambda: driver.record_external(external, captured.main),
        "wait_external": lambda: driver.wait_external(captured.main, external),
        "copy_to_device": lambda: driver.copy_to_device(address, source, PAGE, captured.main),
        "copy_to_host": lambda: driver.copy_to_host(out, address, PAGE, captured.main),
        "fill": lambda: driver.fill(address, NEW[0], PAGE, captured.main),
    }
    driver.fail_at(1, call=call)
    with refused(Failure.DRIVER, f"{call} failed: a test asked"):
        calls[call]()
    graph = captured.end()
    gate = Gate(driver, captured.main)
    driver.launch_graph(graph, captured.main)
    assert driver.is_complete(external) == 1
    gate.open()
    driver.synchronize_stream(captured.main)
    assert read(driver, address, PAGE) == bytes(PAGE) and out.raw == OLD


@pytest.mark.parametrize("call", ["begin_capture", "end_capture", "destroy_graph"])
def test_calls_of_a_capture_can_be_made_to_fail(driver: SoftDriver, call: str) -> None:
    """After an end that failed no stream is captured, and no graph is left; nor after a destruction that failed."""
    stream, calls = driver.create_stream(), driver.calls()
    driver.fail_at(1, call=call)
    with pytest.raises(DriverFailure):
        driver.begin_capture(stream)
        graph = driver.end_capture(stream)
        driver.destroy_graph(graph)
    assert driver.failed_call() == call
    assert driver.calls() == calls + ["begin_capture", "end_capture", "destroy_graph"].index(call) + 1
    assert not driver.is_capturing(stream)
    assert driver.counts().graphs == 0


def test_threads_capture_and_launch_on_one_driver() -> None:
    """Each its own captures, all of them launching one graph whose launches are chained by an event."""
    with SoftDriver() as driver:
        driver.set_delays(5, 20_000)
        errors: list[BaseException] = []
        common, event, seen, lock = begin(driver), driver.create_event(False), [], threading.Lock()
        driver.wait_external(common.main, event)
        driver.call(common.side, lambda: seen.append("node"))
        driver.record_external(event, common.main)
        shared = common.end()

        def work(seed: int) -> None:
            try:
                for turn in range(6):
                    assert ring_mismatches(driver, (seed + turn) % 4, seed, missing="") == 0
                    with lock:
                        driver.launch_graph(shared, common.main if seed % 2 else common.side, turn % 4, seed)
                    driver.synchronize_event(event)
                    broken = begin(driver)
                    with pytest.raises(DriverFailure):
                        driver.synchronize_stream(broken.side)
                    driver.destroy_stream(broken.main if turn % 2 else broken.side)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for stream in (common.main, common.side):
            driver.synchronize_stream(stream)
        assert len(seen) == 24
