"""The soft driver keeps to what a CUDA driver does: ordering, aliasing, caps, and failures that reach whoever waits."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.builds import ROOT
from tests.runtime.soft import INLINE, DriverFailure, Failure, SoftDriver, hash_of

PAGE = mmap.PAGESIZE


@pytest.fixture
def driver() -> Iterator[SoftDriver]:
    with SoftDriver() as soft:
        yield soft


class Gate:
    """Holds a stream where it stands, so that what is queued behind is certainly pending."""

    def __init__(self, driver: SoftDriver, stream: int) -> None:
        self._open = threading.Event()
        driver.call(stream, self._wait)

    def _wait(self) -> None:
        # Far beyond any test; it only keeps a broken test from hanging the suite.
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


def buffer(data: bytes) -> Any:
    return ctypes.create_string_buffer(data, len(data))


def memory(driver: SoftDriver, nbytes: int) -> int:
    address = driver.reserve(nbytes)
    driver.map(address, nbytes, driver.create_block(nbytes))
    driver.allow_access(address, nbytes)
    return int(address)


def read(driver: SoftDriver, address: int, nbytes: int, stream: int | None = INLINE) -> bytes:
    out = ctypes.create_string_buffer(nbytes)
    driver.copy_to_host(out, address, nbytes, stream)
    driver.synchronize_stream(stream)
    return out.raw


def is_readable(address: int) -> bool:
    """Whether the system could read the byte; it answers instead of crashing."""
    out, into = os.pipe()
    try:
        return os.write(into, (ctypes.c_char * 1).from_address(address)) == 1
    except OSError:
        return False
    finally:
        os.close(out)
        os.close(into)


@contextlib.contextmanager
def refused(failure: Failure, pattern: str) -> Iterator[None]:
    with pytest.raises(DriverFailure, match=pattern) as info:
        yield
    assert info.value.failure == failure


def truncated_source(folder: Path) -> mmap.mmap:
    path = folder / "weights"
    path.write_bytes(b"w" * 2 * PAGE)
    with path.open("r+b") as file:
        source = mmap.mmap(file.fileno(), 2 * PAGE)
        file.truncate(PAGE)
    return source


# Device memory


def test_one_block_under_two_addresses_is_the_same_memory(driver: SoftDriver) -> None:
    block = driver.create_block(PAGE)
    here, there = driver.reserve(PAGE), driver.reserve(3 * PAGE) + PAGE
    for address in (here, there):
        driver.map(address, PAGE, block)
        driver.allow_access(address, PAGE)
    driver.copy_to_device(here, buffer(b"penstock"), 8, INLINE)
    assert here != there and read(driver, there, 8) == b"penstock"


def test_a_mapping_is_readable_only_between_allow_access_and_unmap(driver: SoftDriver) -> None:
    address, block = driver.reserve(PAGE), driver.create_block(PAGE)
    seen = [is_readable(address)]
    driver.map(address, PAGE, block)
    seen.append(is_readable(address))
    driver.allow_access(address, PAGE)
    seen.append(is_readable(address))
    driver.unmap(address, PAGE)
    seen.append(is_readable(address))
    assert seen == [False, False, True, False]


def test_a_block_lives_as_long_as_its_last_mapping(driver: SoftDriver) -> None:
    address, block = driver.reserve(PAGE), driver.create_block(PAGE)
    driver.map(address, PAGE, block)
    driver.allow_access(address, PAGE)
    driver.release_block(block)
    driver.fill(address, 7, PAGE, INLINE)
    assert read(driver, address, 2) == b"\7\7"
    assert (driver.counts().blocks, driver.counts().block_bytes) == (0, PAGE)
    driver.unmap(address, PAGE)
    driver.unreserve(address, PAGE)
    assert driver.counts().alive() == {} and driver.counts().peak_block_bytes == PAGE


def test_ranges_are_aligned_to_the_granularity_and_blocks_made_of_it() -> None:
    with SoftDriver(page_bytes=16 * PAGE) as driver:
        assert driver.granularity_bytes() == 16 * PAGE
        assert all(driver.reserve(48 * PAGE) % (16 * PAGE) == 0 for _ in range(5))
        with refused(Failure.DRIVER, f"{PAGE} bytes .* whole units of {16 * PAGE}"):
            driver.create_block(PAGE)
    with refused(Failure.DRIVER, "no multiple of the system's page"):
        SoftDriver(page_bytes=PAGE + 1)


def test_unmap_may_span_whole_mappings_and_only_those(driver: SoftDriver) -> None:
    address = driver.reserve(4 * PAGE)
    for at in (0, 2 * PAGE):
        driver.map(address + at, 2 * PAGE, driver.create_block(2 * PAGE))
    with refused(Failure.DRIVER, "whole mappings"):
        driver.unmap(address, 3 * PAGE)
    with refused(Failure.DRIVER, "still hold a mapping"):
        driver.unreserve(address, 4 * PAGE)
    driver.unmap(address, 4 * PAGE)
    assert driver.counts().mappings == 0


def test_mappings_must_fit_the_block_the_range_and_each_other(driver: SoftDriver) -> None:
    address, block = driver.reserve(2 * PAGE), driver.create_block(PAGE)
    with refused(Failure.DRIVER, f"has {PAGE} bytes, not {2 * PAGE}"):
        driver.map(address, 2 * PAGE, block)
    with refused(Failure.DRIVER, "one reserved range"):
        driver.map(address + 2 * PAGE, PAGE, block)
    driver.map(address, PAGE, block)
    with refused(Failure.DRIVER, "overlap"):
        driver.map(address, PAGE, block)
    with refused(Failure.DRIVER, "whole mappings"):
        driver.allow_access(address, 2 * PAGE)
    with refused(Failure.DRIVER, "block 99"):
        driver.map(address + PAGE, PAGE, 99)


def test_the_capacity_holds_blocks_and_pools_to_the_byte() -> None:
    with SoftDriver(capacity_bytes=4 * PAGE) as driver:
        driver.create_block(2 * PAGE)
        pool = driver.create_pool(8 * PAGE)
        lent = driver.pool_allocate(pool, PAGE, INLINE)
        assert driver.memory_info() == (PAGE, 4 * PAGE)
        with refused(Failure.DEVICE_MEMORY, f"{2 * PAGE} bytes asked for, {PAGE} free of {4 * PAGE}"):
            driver.create_block(2 * PAGE)
        with refused(Failure.DEVICE_MEMORY, f"{PAGE + 1} bytes asked for, {PAGE} free of {4 * PAGE}"):
            driver.pool_allocate(pool, PAGE + 1, INLINE)
        driver.pool_release(pool, lent, INLINE)
        driver.release_block(driver.create_block(2 * PAGE))
        assert driver.memory_info() == (2 * PAGE, 4 * PAGE)


def test_without_a_capacity_the_machine_is_the_device(driver: SoftDriver) -> None:
    free, total = driver.memory_info()
    assert total == os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 0 < free <= total


def test_fresh_blocks_are_poisoned() -> None:
    with SoftDriver(poison=True) as driver:
        assert read(driver, memory(driver, 2 * PAGE), 2 * PAGE) == b"\xff" * 2 * PAGE


# Streams and events


def test_a_stream_works_in_order_and_apart_from_the_host(driver: SoftDriver) -> None:
    stream, address, source = driver.create_stream(), memory(driver, PAGE), buffer(b"a" * PAGE)
    order: list[int] = []
    gate = Gate(driver, stream)
    driver.copy_to_device(address, source, PAGE, stream)
    for number in range(20):
        driver.call(stream, functools.partial(order.append, number))
    driver.fill(address + 4, ord("b"), 4, stream)
    assert order == [] and read(driver, address, 1) == b"\0"
    gate.open()
    assert read(driver, address, 12, stream) == b"aaaabbbbaaaa"
    assert order == list(range(20))


def test_an_event_completes_when_its_stream_gets_there(driver: SoftDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event(False)
    assert driver.is_complete(event)
    gate = Gate(driver, stream)
    driver.record(event, stream)
    assert not driver.is_complete(event)
    gate.open()
    driver.synchronize_event(event)
    assert driver.is_complete(event)


def test_a_stream_waits_for_another_and_the_inline_stream_too(driver: SoftDriver) -> None:
    first, second, event = driver.create_stream(), driver.create_stream(), driver.create_event(False)
    order: list[str] = []
    gate = Gate(driver, first)
    driver.call(first, lambda: order.append("first"))
    driver.record(event, first)
    driver.wait(second, event)
    driver.call(second, lambda: order.append("second"))
    threading.Thread(target=gate.open).start()
    driver.wait(INLINE, event)
    assert order[0] == "first"
    driver.synchronize_stream(second)
    assert order == ["first", "second"]


def test_a_wait_is_for_the_recording_before_it_and_no_later_one(driver: SoftDriver) -> None:
    fast, slow, waiter = (driver.create_stream() for _ in range(3))
    event = driver.create_event(False)
    driver.wait(waiter, event)  # never recorded: no wait
    driver.synchronize_stream(waiter)
    gate = Gate(driver, slow)
    driver.record(event, fast)
    driver.wait(waiter, event)
    driver.record(event, slow)
    driver.synchronize_stream(waiter)
    assert not driver.is_complete(event)
    gate.open()
    driver.synchronize_event(event)


def test_recording_again_does_not_free_those_who_wait_for_the_earlier_one(driver: SoftDriver) -> None:
    slow, waiter = driver.create_stream(), driver.create_stream()
    event, behind = driver.create_event(False), driver.create_event(False)
    gate = Gate(driver, slow)
    driver.record(event, slow)
    driver.wait(waiter, event)
    driver.record(behind, waiter)
    driver.record(event, INLINE)
    assert driver.is_complete(event) and not driver.is_complete(behind)
    gate.open()
    driver.synchronize_event(behind)


def test_an_event_may_be_destroyed_while_a_stream_waits_for_it(driver: SoftDriver) -> None:
    slow, waiter, event = driver.create_stream(), driver.create_stream(), driver.create_event(False)
    order: list[str] = []
    gate = Gate(driver, slow)
    driver.call(slow, lambda: order.append("slow"))
    driver.record(event, slow)
    driver.wait(waiter, event)
    driver.call(waiter, lambda: order.append("waiter"))
    driver.destroy_event(event)
    gate.open()
    driver.synchronize_stream(waiter)
    assert order == ["slow", "waiter"] and driver.counts().events == 0
    with refused(Failure.DRIVER, "no such event"):
        driver.record(event, INLINE)


def test_destroying_a_stream_finishes_its_queue(driver: SoftDriver) -> None:
    stream = driver.create_stream()
    done: list[int] = []
    gate = Gate(driver, stream)
    for number in range(5):
        driver.call(stream, functools.partial(done.append, number))
    threading.Thread(target=gate.open).start()
    driver.destroy_stream(stream)
    assert done == list(range(5)) and driver.counts().streams == 0
    with refused(Failure.DRIVER, "no such stream"):
        driver.synchronize_stream(stream)


def test_closing_the_driver_finishes_streams_that_wait_for_each_other() -> None:
    done: list[str] = []
    with SoftDriver() as driver:
        streams = [driver.create_stream() for _ in range(3)]
        gate = Gate(driver, streams[0])
        for before, after in itertools.pairwise([*streams, streams[0]]):
            event = driver.create_event(False)
            driver.record(event, before)
            driver.wait(after, event)
            driver.call(after, lambda: done.append("done"))
        threading.Thread(target=gate.open).start()
    assert len(done) == 3


def test_elapsed_time_is_between_completions(driver: SoftDriver) -> None:
    stream = driver.create_stream()
    start, stop, untimed = driver.create_event(True), driver.create_event(True), driver.create_event(False)
    with refused(Failure.DRIVER, "first event was never recorded"):
        driver.elapsed_ns(start, stop)
    gate = Gate(driver, stream)
    driver.set_clock(7, 1500)
    driver.record(start, stream)
    driver.fill(memory(driver, PAGE), 1, PAGE, stream)
    driver.record(stop, stream)
    with refused(Failure.DRIVER, "first event is not complete"):
        driver.elapsed_ns(start, stop)
    gate.open()
    driver.synchronize_event(stop)
    # One tick for the gate, which stands before, and one for the work between them.
    assert driver.elapsed_ns(start, stop) == 1500
    assert driver.elapsed_ns(stop, start) == -driver.elapsed_ns(start, stop)
    driver.record(untimed, INLINE)
    with refused(Failure.DRIVER, "second event was created without timing"):
        driver.elapsed_ns(start, untimed)


def test_capturing_is_what_a_test_says(driver: SoftDriver) -> None:
    stream = driver.create_stream()
    driver.set_capturing(stream, True)
    assert (driver.is_capturing(stream), driver.is_capturing(INLINE)) == (1, 0)
    driver.set_capturing(stream, False)
    assert driver.is_capturing(stream) == 0


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 4096, 4099])
def test_the_hash_is_that_of_the_source(driver: SoftDriver, nbytes: int) -> None:
    data, stream, address = random.Random(nbytes).randbytes(nbytes), driver.create_stream(), memory(driver, 2 * PAGE)
    source = buffer(data)
    driver.copy_to_device(address, source, nbytes, stream)
    later, event = driver.hash(stream, address, nbytes, 1000), driver.create_event(False)
    driver.record(event, stream)
    driver.wait(INLINE, event)
    assert later.value == hash_of(data) == driver.hash(INLINE, address, nbytes).value


# A source that cannot be read


def test_an_unreadable_source_fails_everyone_who_waits_for_it(driver: SoftDriver, tmp_path: Path) -> None:
    source = truncated_source(tmp_path)
    start = ctypes.addressof(ctypes.c_char.from_buffer(source))
    address, order = memory(driver, 2 * PAGE), []
    with refused(Failure.HOST_READ, "could not be read"):
        driver.copy_to_device(address, start, 2 * PAGE, INLINE)
    driver.copy_to_device(address, start, PAGE, INLINE)
    copier, second, third, healthy = (driver.create_stream() for _ in range(4))
    before, event, spread = (driver.create_event(True) for _ in range(3))
    driver.record(before, copier)
    driver.copy_to_device(address, start, 2 * PAGE, copier)
    driver.call(copier, lambda: order.append("skipped"))
    driver.record(event, copier)
    driver.wait(second, event)
    driver.record(spread, second)
    driver.wait(third, spread)
    observers: list[Callable[[], object]] = [
        lambda: driver.synchronize_stream(copier),
        lambda: driver.synchronize_stream(copier),
        lambda: driver.wait(INLINE, event),
        lambda: driver.synchronize_event(event),
        lambda: driver.is_complete(event),
        lambda: driver.elapsed_ns(before, event),
        lambda: driver.synchronize_stream(second),
        lambda: driver.wait(INLINE, spread),
        lambda: driver.synchronize_stream(third),
    ]
    for observe in observers:
        with refused(Failure.HOST_READ, f"source of {2 * PAGE} bytes could not be read"):
            observe()
    driver.synchronize_event(before)
    driver.synchronize_stream(healthy)
    assert order == []
    for stream in (copier, second, third, healthy):
        driver.destroy_stream(stream)


def test_a_failed_stream_still_gives_pool_memory_back(driver: SoftDriver, tmp_path: Path) -> None:
    source = truncated_source(tmp_path)
    stream, pool = driver.create_stream(), driver.create_pool(2 * PAGE)
    lent = driver.pool_allocate(pool, 2 * PAGE, stream)
    driver.copy_to_device(lent, ctypes.addressof(ctypes.c_char.from_buffer(source)), 2 * PAGE, stream)
    driver.pool_release(pool, lent, stream)
    driver.destroy_stream(stream)
    driver.pool_release(pool, driver.pool_allocate(pool, 2 * PAGE, INLINE), INLINE)
    driver.destroy_pool(pool)
    assert driver.counts().alive() == {}


# Pools


def test_a_pool_is_full_to_the_byte(driver: SoftDriver) -> None:
    pool = driver.create_pool(1000)
    first = driver.pool_allocate(pool, 600, INLINE)
    second = driver.pool_allocate(pool, 400, INLINE)
    with refused(Failure.DEVICE_MEMORY, "1 bytes asked for, 0 free for this stream of 1000"):
        driver.pool_allocate(pool, 1, INLINE)
    driver.pool_release(pool, first, INLINE)
    with refused(Failure.DEVICE_MEMORY, "601 bytes asked for, 600 free"):
        driver.pool_allocate(pool, 601, INLINE)
    with refused(Failure.DRIVER, "1 allocations of 400 bytes"):
        driver.destroy_pool(pool)
    with refused(Failure.DRIVER, "has it back"):
        driver.pool_release(pool, first, INLINE)
    driver.pool_release(pool, second, INLINE)
    assert driver.pool_peak_bytes(pool) == 1000
    driver.destroy_pool(pool)


def test_released_memory_is_at_once_the_same_streams_and_later_the_others(driver: SoftDriver) -> None:
    stream, other, pool = driver.create_stream(), driver.create_stream(), driver.create_pool(3 * PAGE)
    lent = driver.pool_allocate(pool, 2 * PAGE, stream)
    gate = Gate(driver, stream)
    driver.pool_release(pool, lent, stream)
    for elsewhere in (other, INLINE):
        with refused(Failure.DEVICE_MEMORY, f"{PAGE} free for this stream"):
            driver.pool_allocate(pool, 2 * PAGE, elsewhere)
    again = driver.pool_allocate(pool, 2 * PAGE, stream)
    assert again == lent
    # What the stream took again is not counted twice: the third page is still anybody's.
    spare = driver.pool_allocate(pool, PAGE, other)
    driver.pool_release(pool, again, stream)
    gate.open()
    driver.synchronize_stream(stream)
    driver.pool_release(pool, driver.pool_allocate(pool, 2 * PAGE, other), other)
    driver.pool_release(pool, spare, other)
    assert driver.pool_peak_bytes(pool) == 3 * PAGE
    driver.destroy_pool(pool)
    assert driver.counts().pools == 0


def test_a_pool_may_be_destroyed_while_a_release_is_queued() -> None:
    with SoftDriver(capacity_bytes=4 * PAGE) as driver:
        stream, pool = driver.create_stream(), driver.create_pool(2 * PAGE)
        gate = Gate(driver, stream)
        driver.pool_release(pool, driver.pool_allocate(pool, 2 * PAGE, stream), stream)
        driver.destroy_pool(pool)
        assert driver.memory_info()[0] == 2 * PAGE
        gate.open()
        driver.destroy_stream(stream)
        assert driver.memory_info()[0] == 4 * PAGE


def test_released_pool_memory_is_poisoned_in_stream_order() -> None:
    with SoftDriver(poison=True) as driver:
        stream, pool, source = driver.create_stream(), driver.create_pool(PAGE), buffer(b"w" * 64)
        lent = driver.pool_allocate(pool, 64, stream)
        fresh, kept, stale = (ctypes.create_string_buffer(64) for _ in range(3))
        driver.copy_to_host(fresh, lent, 64, stream)
        driver.copy_to_device(lent, source, 64, stream)
        gate = Gate(driver, stream)
        driver.copy_to_host(kept, lent, 64, stream)
        driver.pool_release(pool, lent, stream)
        again = driver.pool_allocate(pool, 64, stream)
        driver.copy_to_host(stale, again, 64, stream)
        gate.open()
        driver.synchronize_stream(stream)
        assert again == lent
        assert (fresh.raw, kept.raw, stale.raw) == (b"\xff" * 64, b"w" * 64, b"\xff" * 64)


# Host memory


def test_registration_is_checked_as_a_driver_does(driver: SoftDriver) -> None:
    region = mmap.mmap(-1, 4 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    with refused(Failure.REGISTRATION, "do not start on a page"):
        driver.register_host(start + 8, PAGE)
    driver.register_host(start + PAGE, PAGE + 8)
    for at, nbytes in ((PAGE, PAGE), (0, PAGE + 1), (2 * PAGE, PAGE)):
        with refused(Failure.REGISTRATION, "registered already"):
            driver.register_host(start + at, nbytes)
    with refused(Failure.REGISTRATION, "no registration starts"):
        driver.unregister_host(start)
    driver.register_host(start, PAGE)
    assert (driver.counts().registrations, driver.counts().registered_bytes) == (2, 2 * PAGE + 8)
    driver.unregister_host(start)
    driver.unregister_host(start + PAGE)
    assert driver.counts().alive() == {}


def test_host_allocations_are_page_aligned_and_tracked(driver: SoftDriver) -> None:
    first, second = driver.allocate_host(100), driver.allocate_host(PAGE)
    assert first % PAGE == second % PAGE == 0
    driver.free_host(first)
    with refused(Failure.REGISTRATION, "no host memory was allocated"):
        driver.free_host(first)
    counts = driver.counts()
    assert (counts.host_allocations, counts.host_bytes, counts.peak_host_bytes) == (1, PAGE, PAGE + 100)
    driver.free_host(second)


# What tests of the session build on


def tour(driver: SoftDriver) -> None:
    """Every function once, cleaning up as the session does: what gives back is called whatever else failed."""
    cleanups: list[Callable[[], object]] = []
    source, out = mmap.mmap(-1, PAGE), ctypes.create_string_buffer(PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(source))
    errors: list[DriverFailure] = []
    try:
        driver.memory_info()
        driver.granularity_bytes()
        driver.register_host(start, PAGE)
        cleanups.append(lambda: driver.unregister_host(start))
        host = driver.allocate_host(PAGE)
        cleanups.append(lambda: driver.free_host(host))
        block = driver.create_block(PAGE)
        cleanups.append(lambda: driver.release_block(block))
        address = driver.reserve(PAGE)
        cleanups.append(lambda: driver.unreserve(address, PAGE))
        driver.map(address, PAGE, block)
        cleanups.append(lambda: driver.unmap(address, PAGE))
        driver.allow_access(address, PAGE)
        pool = driver.create_pool(PAGE)
        cleanups.append(lambda: driver.destroy_pool(pool))
        # Behind the memory, so that it is destroyed, and its queue finished, before the memory goes.
        stream = driver.create_stream()
        cleanups.append(lambda: driver.destroy_stream(stream))
        event = driver.create_event(True)
        cleanups.append(lambda: driver.destroy_event(event))
        timed = driver.create_event(True)
        cleanups.append(lambda: driver.destroy_event(timed))
        lent = driver.pool_allocate(pool, PAGE, stream)
        cleanups.append(lambda: driver.pool_release(pool, lent, stream))
        driver.pool_peak_bytes(pool)
        driver.is_capturing(stream)
        driver.record(event, INLINE)
        driver.wait(stream, event)
        driver.record_external(event, INLINE)
        driver.wait_external(stream, event)
        driver.copy_to_device(address, start, PAGE, stream)
        driver.fill(lent, 1, PAGE, stream)
        driver.copy_to_host(out, address, PAGE, stream)
        driver.record(timed, stream)
        driver.synchronize_event(timed)
        driver.is_complete(timed)
        driver.elapsed_ns(event, timed)
        driver.synchronize_stream(stream)
    except DriverFailure as error:
        errors.append(error)
    for cleanup in reversed(cleanups):
        try:
            cleanup()
        except DriverFailure as error:
            errors.append(error)
    if errors:
        raise errors[0]


NATURAL = {
    "create_block": Failure.DEVICE_MEMORY,
    "create_pool": Failure.DEVICE_MEMORY,
    "pool_allocate": Failure.DEVICE_MEMORY,
    "register_host": Failure.REGISTRATION,
    "allocate_host": Failure.REGISTRATION,
}


def test_every_call_can_be_made_to_fail_and_nothing_leaks(driver: SoftDriver) -> None:
    tour(driver)
    calls, failed = driver.calls(), set()
    for n in range(1, calls + 1):
        driver.fail_at(n)
        assert driver.failed_call() == ""
        with pytest.raises(DriverFailure) as info:
            tour(driver)
        name = driver.failed_call()
        assert f"{name} failed: a test asked for this" in str(info.value)
        assert info.value.failure == NATURAL.get(name, Failure.DRIVER)
        assert driver.counts().alive() == {}, name
        failed.add(name)
    driver.fail_at(calls + 1)
    tour(driver)
    assert driver.failed_call() == ""
    assert len(failed) == 34  # of the table, what a soft driver has of its own


def test_a_call_can_be_chosen_by_name_and_its_failure_too(driver: SoftDriver) -> None:
    driver.fail_at(2, Failure.STICKY, "create_event")
    driver.create_stream()
    driver.create_event(False)
    with refused(Failure.STICKY, "create_event"):
        driver.create_event(False)
    driver.create_event(False)
    driver.fail_at(1)
    driver.fail_at(0)
    driver.create_event(False)
    assert driver.counts().events == 3


def ring_mismatches(seed: int, held: str) -> int:
    """Copies run ahead of readers through two slots. One stream may be held, and what should wait for it does not."""
    with SoftDriver(poison=True) as driver:
        driver.set_delays(seed, 300_000)
        sources = [buffer(bytes([number]) * PAGE) for number in range(16)]
        streams = {"copier": driver.create_stream(), "reader": driver.create_stream()}
        copier, reader = streams.values()
        gate = Gate(driver, streams[held]) if held else None
        slots = [memory(driver, PAGE) for _ in range(2)]
        ready, free = ([driver.create_event(False) for _ in slots] for _ in range(2))
        hashes = []
        for number, source in enumerate(sources):
            at = number % 2
            if held != "reader":
                driver.wait(copier, free[at])
            driver.copy_to_device(slots[at], source, PAGE, copier)
            driver.record(ready[at], copier)
            if held != "copier":
                driver.wait(reader, ready[at])
            hashes.append(driver.hash(reader, slots[at], PAGE))
            driver.record(free[at], reader)
        if gate:
            driver.synchronize_stream(reader if held == "copier" else copier)
            gate.open()
        driver.synchronize_stream(reader)
        driver.synchronize_stream(copier)
        return sum(out.value != hash_of(source.raw) for out, source in zip(hashes, sources, strict=True))


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_ring_with_its_waits_is_right_under_delays(seed: int) -> None:
    assert ring_mismatches(seed, held="") == 0


@pytest.mark.parametrize(("held", "mismatches"), [("copier", 16), ("reader", 14)])
def test_a_ring_without_one_of_its_waits_reads_wrong_bytes(held: str, mismatches: int) -> None:
    assert ring_mismatches(1, held) == mismatches


def test_several_threads_share_one_driver() -> None:
    with SoftDriver(capacity_bytes=64 * PAGE, poison=True) as driver:
        driver.set_delays(5, 20_000)
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for _ in range(10):
                    data = random.Random(seed).randbytes(PAGE)
                    source, stream, event = buffer(data), driver.create_stream(), driver.create_event(False)
                    pool = driver.create_pool(2 * PAGE)
                    lent = driver.pool_allocate(pool, PAGE, stream)
                    driver.copy_to_device(lent, source, PAGE, stream)
                    out = driver.hash(stream, lent, PAGE)
                    driver.record(event, stream)
                    driver.wait(INLINE, event)
                    assert out.value == hash_of(data)
                    driver.pool_release(pool, lent, stream)
                    driver.destroy_pool(pool)
                    driver.destroy_event(event)
                    driver.destroy_stream(stream)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert driver.counts().alive() == {} and driver.memory_info() == (64 * PAGE, 64 * PAGE)


def test_the_binding_needs_no_torch() -> None:
    code = (
        "import sys; from tests.runtime.soft import SoftDriver; SoftDriver().close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
