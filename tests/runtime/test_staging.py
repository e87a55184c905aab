"""Staging: bytes of the file reach the device in the order that was announced, through a bounded ring of buffers."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.host_cases import (
    DRIVER,
    HOST_READ,
    REGISTRATION,
    USAGE,
    CoreFailure,
    SoftDevice,
    core,
    host,
    host_file,
    soft_device,
)
from tests.threads import thread_count, threads_come_to

BUFFER = 10_000
FILE_BYTES = 300_000
CONTENT = random.Random(7).randbytes(FILE_BYTES)

Pair = tuple[int, int]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("staging") / "weights.ptd"
    path.write_bytes(CONTENT)
    return path


class Staged:
    """A staging over a device whose memory takes one buffer's worth per copy, so that every copy can be looked at."""

    def __init__(self, device: SoftDevice, handle: ctypes.c_void_p) -> None:
        self.device = device
        self.handle = handle
        self.copied: list[Pair] = []

    def follow(self, once: Sequence[Pair], cycle: Sequence[Pair] = ()) -> None:
        arrays = [(ctypes.c_int64 * (2 * len(pairs)))(*(n for pair in pairs for n in pair)) for pairs in (once, cycle)]
        host("staging_follow", self.handle, arrays[0], len(once), arrays[1], len(cycle))

    def next(self, pair: Pair) -> None:
        to = self.device.address.value + len(self.copied) * BUFFER
        host("staging_copy_next", self.handle, *pair, to, self.device.stream)
        self.copied.append(pair)

    def now(self, offset: int, nbytes: int) -> None:
        host("staging_copy_now", self.handle, offset, nbytes, self.device.address, self.device.stream)

    def check(self) -> None:
        self.device.synchronize()
        self.compare()

    def compare(self) -> None:
        for i, (offset, nbytes) in enumerate(self.copied):
            assert self.device.read(i * BUFFER, nbytes) == CONTENT[offset : offset + nbytes], f"copy {i}"

    @property
    def bytes_read(self) -> int:
        return int(core.penstock_test_staging_bytes_read(self.handle))


@contextmanager
def staging(path: Path, *, buffers: int = 3, threads: int = 2, copies: int = 64) -> Iterator[Staged]:
    """Whatever happens inside, nothing of it is left afterwards."""
    with soft_device(copies * BUFFER) as device, host_file(path) as file:
        events, threads_before = device.counts().events, thread_count()
        handle = ctypes.c_void_p()
        host("staging_create", device.driver, file, BUFFER, buffers, threads, ctypes.byref(handle))
        try:
            assert core.penstock_test_staging_host_bytes(handle) == buffers * BUFFER
            yield Staged(device, handle)
            assert device.counts().peak_host_bytes == buffers * BUFFER
        finally:
            core.penstock_test_staging_destroy(handle)
        assert (device.counts().host_bytes, device.counts().events) == (0, events)
        assert threads_come_to(threads_before)


pairs = st.tuples(st.integers(0, FILE_BYTES - BUFFER), st.integers(1, BUFFER))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    once=st.lists(pairs, max_size=6),
    cycle=st.lists(pairs, max_size=6),
    rounds=st.integers(0, 4),
    buffers=st.integers(1, 5),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_order_arrives_whole(
    path: Path, once: list[Pair], cycle: list[Pair], rounds: int, buffers: int, threads: int, seed: int
) -> None:
    with staging(path, buffers=buffers, threads=threads) as staged:
        staged.device.set_delays(seed, 200_000)
        staged.follow(once, cycle)
        for pair in [*once, *cycle * rounds]:
            staged.next(pair)
        staged.check()
        assert staged.bytes_read >= sum(nbytes for _, nbytes in staged.copied)


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_a_buffer_is_not_refilled_under_its_copy(path: Path, buffers: int) -> None:
    """S10. The stream is held up, so that every copy is still to come when the next reads could begin."""
    with staging(path, buffers=buffers, threads=4) as staged:
        cycle = [(i * BUFFER, BUFFER) for i in range(7)]
        staged.follow([], cycle)
        staged.device.set_late()
        for _ in range(2):
            for pair in cycle:
                staged.next(pair)
        staged.check()


def test_reading_runs_ahead_by_the_ring_and_no_further(path: Path) -> None:
    with staging(path, buffers=3) as staged:
        cycle = [(i * BUFFER, 1000 + i) for i in range(5)]
        staged.follow([], cycle)
        staged.next(cycle[0])
        staged.next(cycle[1])
        staged.next(cycle[2])
        # Three read and copied, then at most the three buffers again.
        staged.follow([], [])
        assert staged.bytes_read <= sum(nbytes for _, nbytes in [*cycle, cycle[0]])
        staged.check()


def test_a_new_order_drops_what_was_read_for_the_old(path: Path) -> None:
    with staging(path) as staged:
        for start in range(0, 20):
            order = [((start * 7 + i * 3) % 25 * BUFFER, BUFFER - start) for i in range(6)]
            staged.follow(order[:2], order[2:])
            for pair in order[: start % 4]:
                staged.next(pair)
        staged.check()


def test_left_in_the_middle_with_copies_under_way(path: Path) -> None:
    with soft_device(2 * BUFFER) as device, host_file(path) as file:
        handle = ctypes.c_void_p()
        host("staging_create", device.driver, file, BUFFER, 2, 2, ctypes.byref(handle))
        staged = Staged(device, handle)
        # Nothing comes after these, so that no reader waits for the copies either.
        staged.follow([(0, BUFFER), (BUFFER, BUFFER)], [])
        device.set_late()
        staged.next((0, BUFFER))
        staged.next((BUFFER, BUFFER))
        core.penstock_test_staging_destroy(handle)
        # Nothing waits here: destroying has.
        staged.compare()
        assert device.counts().host_bytes == 0


def test_never_asked_for_anything(path: Path) -> None:
    with staging(path, buffers=2) as staged:
        staged.follow([(0, BUFFER)] * 9, [])
    with staging(path):
        pass


@pytest.mark.parametrize("nbytes", [0, 1, BUFFER, BUFFER + 1, 7 * BUFFER + 3])
def test_bytes_outside_an_order_are_in_place_on_return(path: Path, nbytes: int) -> None:
    with staging(path) as staged:
        staged.device.set_late()
        staged.now(77, nbytes)
        assert staged.device.read(0, nbytes) == CONTENT[77 : 77 + nbytes]
        assert staged.bytes_read == nbytes
        staged.follow([(5, 50)], [])
        staged.next((5, 50))
        staged.check()


def test_what_breaks_the_order_is_refused_and_changes_nothing(path: Path) -> None:
    with staging(path) as staged:
        staged.follow([(0, 10), (10, 10)])
        staged.next((0, 10))
        for pair, words in (((0, 10), "where bytes 10 to 20 are due"), ((10, 9), "where bytes 10 to 20 are due")):
            with pytest.raises(CoreFailure, match=words) as caught:
                staged.next(pair)
            assert caught.value.code == USAGE and str(path) in str(caught.value)
        with pytest.raises(CoreFailure, match="outside the order") as caught:
            staged.now(0, 1)
        assert caught.value.code == USAGE
        staged.next((10, 10))
        with pytest.raises(CoreFailure, match="after the last extent"):
            staged.next((20, 10))
        for pair in ((0, BUFFER + 1), (0, 0), (-1, 5), (FILE_BYTES - 4, 5)):
            with pytest.raises(CoreFailure) as caught:
                staged.follow([], [pair])
            assert caught.value.code == USAGE and str(path) in str(caught.value)
        staged.check()


@pytest.mark.parametrize(("nbytes", "buffers", "threads"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_ring_of_nothing_is_refused(path: Path, nbytes: int, buffers: int, threads: int) -> None:
    with soft_device(BUFFER) as device, host_file(path) as file:
        with pytest.raises(CoreFailure, match=f"{nbytes} bytes, {buffers} buffers and {threads} threads") as caught:
            host("staging_create", device.driver, file, nbytes, buffers, threads, ctypes.byref(ctypes.c_void_p()))
        assert caught.value.code == USAGE


def test_a_truncated_file_fails_at_the_extent_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "weights.ptd"
    path.write_bytes(CONTENT)
    with staging(path) as staged:
        os.truncate(path, 15_000)
        staged.follow([(0, BUFFER), (BUFFER, BUFFER), (0, 5)], [])
        staged.next((0, BUFFER))
        for _ in range(2):
            with pytest.raises(CoreFailure, match=f"had {FILE_BYTES} bytes and now ends at 15000") as caught:
                staged.next((BUFFER, BUFFER))
            assert caught.value.code == HOST_READ and str(path) in str(caught.value)
        staged.follow([], [(3, 30)])
        staged.next((3, 30))
        with pytest.raises(CoreFailure) as caught:
            staged.follow([], [])
            staged.now(0, 2 * BUFFER)
        assert caught.value.code == HOST_READ
        staged.follow([], [(7, 30)])
        staged.next((7, 30))
        staged.check()


def whole_story(staged: Staged) -> None:
    staged.now(0, 2 * BUFFER)
    staged.follow([(5, BUFFER)], [(i * BUFFER, BUFFER) for i in range(3)])
    staged.next((5, BUFFER))
    for _ in range(2):
        for i in range(3):
            staged.next((i * BUFFER, BUFFER))
    staged.follow([], [(9, 9)])
    staged.next((9, 9))


def failure_of(name: str, *arguments: object) -> CoreFailure | None:
    try:
        host(name, *arguments)
    except CoreFailure as failure:
        return failure
    return None


def failure_of_story(staged: Staged) -> CoreFailure | None:
    try:
        whole_story(staged)
    except CoreFailure as failure:
        return failure
    return None


def tell_with_failure_at(number: int, device: SoftDevice, file: ctypes.c_void_p, path: Path) -> bool:
    """Whether the failure was told."""
    device.fail_at(number)
    handle = ctypes.c_void_p()
    refused = failure_of("staging_create", device.driver, file, BUFFER, 2, 2, ctypes.byref(handle))
    if refused:
        assert refused.code == REGISTRATION
        assert f"weights file {path}: pinned buffer" in str(refused) and f"{BUFFER} bytes each" in str(refused)
        return True
    staged = Staged(device, handle)
    failure = failure_of_story(staged)
    if failure:
        assert failure.code == DRIVER and device.failed_call() in str(failure)
        staged.copied.clear()
        staged.follow([], [(1, 10)])
        staged.next((1, 10))
    core.penstock_test_staging_destroy(handle)
    # Destroying has waited for the last copies, even where waiting was made to fail. Nothing else waits here, so that
    # the failure falls on a call of the staging's own.
    staged.compare()
    return failure is not None


def test_each_driver_call_made_to_fail_in_turn(path: Path) -> None:
    """The failure is told or (when things are given back) harmless; nothing is left, and what follows works."""
    told: set[str] = set()
    for number in itertools.count(1):
        with soft_device(64 * BUFFER) as device, host_file(path) as file:
            before, threads_before = device.counts(), thread_count()
            if tell_with_failure_at(number, device, file, path):
                told.add(device.failed_call())
            failed = device.failed_call()
            device.fail_at(0)
            after = device.counts()
            assert (after.host_allocations, after.events, after.streams) == (0, before.events, before.streams), failed
            assert threads_come_to(threads_before), failed
            if not failed:
                break
    assert told >= {"allocate_host", "create_event", "copy_to_device", "record", "synchronize_event"}


def test_two_rings_in_two_threads(path: Path) -> None:
    problems: list[BaseException] = []

    def work(shift: int) -> None:
        try:
            with host_file(path) as file:
                handle = ctypes.c_void_p()
                host("staging_create", device.driver, file, BUFFER, 2, 2, ctypes.byref(handle))
                staged = Staged(device, handle)
                order = [(shift * 1000 + i, 500) for i in range(10)]
                staged.follow([], order)
                target = device.address.value + shift * 1000
                for _ in range(5):
                    for pair in order:
                        host("staging_copy_next", handle, *pair, target, device.stream)
                core.penstock_test_staging_destroy(handle)
        except BaseException as problem:
            problems.append(problem)

    with soft_device(10 * BUFFER) as device:
        threads = [threading.Thread(target=work, args=(shift,)) for shift in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        for shift in range(2):
            start = shift * 1000 + 9
            assert device.read(shift * 1000, 500) == CONTENT[start : start + 500]
