"""Everything a session does, quickly and from several threads: for builds with a sanitizer, which does the judging.

`python -m tests.runtime.session_stress stress|race|overrun`; the last two make that fault on purpose.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.plan.floor import floor_bytes
from tests.native.session import HostSource
from tests.runtime.scenarios import SCENARIOS
from tests.runtime.session_harness import INLINE, MS, PAGE, Model, RunFailed, SessionHarness, models, staged
from tests.runtime.soft import SoftDriver

THREADS = 3  # the order in which the soft driver runs the nodes of a graph
SOURCES: list[HostSource | None] = [None, staged(3000, 3, 3), staged(PAGE, 1, 1)]


def planned(model: Model, source: HostSource | None, *, poison: bool) -> None:
    with SessionHarness(model, source=source, poison=poison, kernel_ns=MS // 4) as harness:
        harness.driver.set_delays(3, MS // 10)
        streams = [harness.stream(), harness.stream(), INLINE]
        for budget in (model.floor_bytes, model.full_bytes, model.floor_bytes + PAGE):
            harness.install(budget)
            harness.session.start_trace()
            for run in range(6):
                harness.run(run // 2 % len(model.schedules), streams[run % 3], check=False)
            harness.session.stop_trace()
            fail(harness, streams[0])
            harness.run(stream=streams[1])
            harness.check_counters()


def replays(model: Model, *, poison: bool) -> None:
    """Graphs whose nodes run on several threads, between runs that are no replays."""
    with SessionHarness(model, poison=poison, kernel_ns=MS // 4) as harness:
        harness.driver.set_delays(3, MS // 10)
        streams = [harness.stream(), harness.stream()]
        for budget in (model.floor_bytes, model.full_bytes, model.floor_bytes + PAGE):
            harness.install(budget)
            methods = len(model.schedules)
            graphs = [harness.capture(method) for method in range(methods)]
            for run in range(6):
                harness.replay(graphs[run // 2 % methods], streams[run % 2], order=THREADS, seed=run, check=False)
                if run % 3 == 2:
                    harness.run(run % methods, streams[0], check=False)
            fail(harness, streams[0])
            harness.replay(graphs[0], streams[1], order=THREADS)
            harness.session.drop_capture(graphs[0].number)


def lru(model: Model) -> None:
    floor = floor_bytes(model.schedules, model.weights, granularity_bytes=PAGE).floor_bytes
    with SessionHarness(model, lru=True, kernel_ns=MS // 4) as harness:
        harness.driver.set_delays(5, MS // 10)
        streams = [harness.stream(), harness.stream(), INLINE]
        for budget in (floor, floor + 3 * PAGE):
            harness.install_lru(budget)
            for run in range(6):
                harness.run(run // 2 % len(model.schedules), streams[run % 3], check=False)
            fail(harness, streams[0])
            harness.run(stream=streams[1])
            harness.session.stats()


def fail(harness: SessionHarness, stream: int) -> None:
    """Divergence, and calls that fail, with copies and kernels under way."""
    harness.begin(stream=stream)
    try:
        harness.acquire(-1)
        raise AssertionError("a divergent access was served")
    except RunFailed:
        pass
    for call in ("record", "wait", "synchronize_event", "copy_to_device"):
        for n in (1, 4):
            harness.driver.fail_at(n, call=call)
            try:
                harness.run(stream=stream, check=False)
            except (PenstockError, RunFailed):
                harness._owner = None
            harness.driver.fail_at(0)
    harness.await_kernels(stream)
    harness.check_hashes()


def truncated(model: Model, source: HostSource | None) -> None:
    before = model.path.read_bytes()
    with SessionHarness(model, source=source) as harness:
        harness.install(model.floor_bytes)
        harness.run()
        try:
            harness.begin()
            for _ in harness.steps():
                os.truncate(model.path, PAGE)
            harness.end()
            harness.session.drain()
            raise AssertionError("a truncated file went unnoticed")
        except (PenstockError, RunFailed):
            pass
    model.path.write_bytes(before)


def side_by_side(one: Model, other: Model) -> None:
    failures: list[BaseException] = []

    def work(model: Model, driver: SoftDriver) -> None:
        try:
            harness = SessionHarness(model, driver=driver, kernel_ns=MS // 10, source=staged())
            for _ in range(2):
                harness.install(model.floor_bytes)
                for _ in range(6):
                    harness.run(check=False)
            harness.check()
            harness.session.close()
        except BaseException as error:
            failures.append(error)

    with SoftDriver(PAGE, 0, poison=True) as driver:
        threads = [threading.Thread(target=work, args=(model, driver)) for model in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert not driver.counts().alive()


def race(folder: Path) -> None:
    """Two streams write the same device bytes with nothing between them.

    Nothing, however slow the machine: this thread looks at the bytes themselves, for a call of the driver would order
    the one write before the other as soon as the second stream were late.
    """
    with SoftDriver(PAGE, 0, poison=False) as driver:
        block, address = driver.create_block(PAGE), driver.reserve(PAGE)
        driver.map(address, PAGE, block)
        driver.allow_access(address, PAGE)
        page = (ctypes.c_ubyte * PAGE).from_address(address)
        streams = [driver.create_stream(), driver.create_stream()]
        for value, stream in enumerate(streams, start=1):
            driver.fill(address, value, PAGE, stream)
            while page[PAGE - 1] != value:
                time.sleep(1e-3)
        for stream in streams:
            driver.destroy_stream(stream)


def overrun(folder: Path) -> None:
    """A kernel reads past the end of its memory."""
    memory = ctypes.create_string_buffer(PAGE)
    with SoftDriver(PAGE, 0, poison=False) as driver:
        driver.hash(INLINE, ctypes.addressof(memory), PAGE + 64)


def stress(folder: Path) -> None:
    zoo = models(folder)
    for number, name in enumerate(("methods", "tied", "small")):
        for source in SOURCES:
            planned(zoo[name], source, poison=bool(number % 2))
        replays(zoo[name], poison=bool(number % 2))
        lru(zoo[name])
    for source in SOURCES:
        truncated(zoo["chain"], source)
    side_by_side(zoo["tied"], zoo["pairs"])
    for name in SCENARIOS:
        (folder / name).mkdir()
        SCENARIOS[name](folder / name)


if __name__ == "__main__":
    plays: dict[str, Callable[[Path], None]] = {"race": race, "overrun": overrun, "stress": stress}
    with tempfile.TemporaryDirectory() as made:
        plays[sys.argv[1]](Path(made))
    print("done")
