"""The planned session over the soft driver: every byte a kernel reads, every byte moved, every page held."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import (
    CaptureError,
    DriverCallError,
    HostMemoryError,
    PenstockError,
    ScheduleDivergedError,
    WeightsChangedError,
)
from penstock.native import core
from tests.native.session import HostSource, acquire, multiply_and_fail, uninstall
from tests.runtime.scenarios import SCENARIOS
from tests.runtime.session_harness import (
    INLINE,
    MS,
    PAGE,
    Model,
    RunFailed,
    SessionHarness,
    chain,
    models,
    staged,
    write_model,
)
from tests.runtime.soft import SoftDriver

NAMES = ["chain", "tied", "pairs", "long_reads", "small", "methods"]
SOURCES: dict[str, HostSource | None] = {
    "registered": None,
    "staged": staged(3000, 3, 2),
    "one buffer": staged(PAGE, 1, 1),
    "three readers": staged(2 * PAGE, 4, 3),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return models(tmp_path_factory.mktemp("session"))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    names = [f"w{i}" for i in range(6)]
    return write_model(tmp_path / "weights.ptd", [chain(*names)], dict.fromkeys(names, 2 * PAGE))


@pytest.fixture
def harness(model: Model) -> Iterator[SessionHarness]:
    with SessionHarness(model) as made:
        made.install(model.floor_bytes)
        yield made


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenario(name: str, tmp_path: Path) -> None:
    SCENARIOS[name](tmp_path)


def test_how_fast_copies_are_is_rounded_half_up(model: Model) -> None:
    """Without a float: as C prints one depends on the locale, and 0.25 would be 0.2."""
    for took_ns, rate in ((8 * PAGE, "0.3"), (2 * PAGE, "1.0"), (81, "101.1"), (41 * PAGE, "0.0")):
        with SessionHarness(model) as harness:
            harness.driver.set_clock(0, took_ns)
            harness.install(model.floor_bytes)
            assert {(one.nbytes, one.ns) for one in harness.session.link()[:1]} == {(12 * PAGE, 6 * took_ns)}
            amounts = {"floor_bytes": 0, "budget_bytes": 0, "origin": 0, "copying_bytes": 0}
            line = harness.session.summary(name="m", device="cpu", methods=["one"], remarks=[], **amounts)
            assert line.endswith(f", copies at {rate} GB/s")


def test_what_a_call_into_torch_throws_ends_at_the_session() -> None:
    """It is generated code that calls."""
    with pytest.raises(HostMemoryError, match="^the host has no memory left$"):
        multiply_and_fail(out_of_memory=True)
    with pytest.raises(PenstockError, match="^too long$"):
        multiply_and_fail(out_of_memory=False)


# ---- budgets, runs, streams, methods


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("poison", [True, False], ids=["poison", "plain"])
def test_every_budget_from_the_floor_up(zoo: dict[str, Model], name: str, source: str, poison: bool) -> None:
    model = zoo[name]
    for seed, budget in enumerate(model.budgets(4), 1):
        with SessionHarness(model, poison=poison, source=SOURCES[source], seed=seed, kernel_ns=MS // 10) as harness:
            plan = harness.install(budget)
            assert (plan.methods[0].warm.bytes_streamed == 0) == (budget == model.full_bytes)
            streams = [harness.stream(), INLINE, harness.stream()]
            harness.driver.set_delays(seed, MS // 20)
            for run in range(4):
                for method in range(len(model.schedules)):
                    harness.run(method, streams[(run + method) % 3])
                    harness.run(method, streams[run % 3])
            harness.check_memory(budget)


def test_the_hundredth_run(zoo: dict[str, Model]) -> None:
    model = zoo["methods"]
    budget = model.budgets(3)[1]
    with SessionHarness(model, kernel_ns=MS // 20) as harness:
        harness.install(budget)
        streams = [harness.stream(), harness.stream()]
        for run in range(100):
            harness.run((run // 7) % 3, streams[run % 2], check=run % 10 == 9)
        assert harness.session.stats()[1].runs == 100
        harness.check_memory(budget)


@pytest.mark.parametrize("source", ["registered", "staged"])
def test_the_host_may_be_many_runs_ahead(zoo: dict[str, Model], source: str) -> None:
    model = zoo["tied"]
    with SessionHarness(model, source=SOURCES[source], kernel_ns=MS) as harness:
        harness.install(model.floor_bytes)
        streams = [harness.stream(), harness.stream(), harness.stream()]
        for run in range(30):
            harness.run(stream=streams[run % 3], check=False)
        assert harness.check() == 30 * len(model.schedules[0].accesses)
        harness.check_counters()
        harness.check_memory(model.floor_bytes)


def test_a_change_of_method_costs_one_refill(zoo: dict[str, Model]) -> None:
    model = zoo["methods"]
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        for method in (0, 1, 0, 2, 1):
            harness.run(method)
            extra = harness.last.bytes_streamed - plan.methods[method].warm.bytes_streamed
            assert 0 < extra <= plan.ring_bytes
            harness.run(method)
            assert harness.last == plan.methods[method].warm


@pytest.mark.parametrize("seed", range(1, 13))
def test_delays_on_every_stream(zoo: dict[str, Model], seed: int) -> None:
    model = zoo[NAMES[seed % len(NAMES)]]
    budget = model.budgets(4)[seed % 2]
    with SessionHarness(
        model, seed=seed, kernel_ns=MS, poison=bool(seed % 3), source=list(SOURCES.values())[seed % 4]
    ) as harness:
        harness.install(budget)
        streams = [harness.stream(), harness.stream(), INLINE]
        harness.driver.set_delays(seed, MS)
        for run in range(4):
            harness.run(run % len(model.schedules), streams[(run * seed) % 3], check=False)
        harness.check()
        harness.check_counters()
        harness.check_memory(budget)


def test_another_budget_between_runs(zoo: dict[str, Model]) -> None:
    model = zoo["tied"]
    low, *_, high = model.budgets(4)
    with SessionHarness(model, kernel_ns=MS) as harness:
        stream = harness.stream()
        for budget in (high, low, high, low + PAGE):
            harness.install(budget)
            for _ in range(2):
                harness.run(stream=stream, check=False)
            assert harness.driver.counts().peak_block_bytes <= high
        harness.check()
        harness.check_counters()


def test_two_sessions_in_two_threads_share_a_driver(zoo: dict[str, Model]) -> None:
    failures: list[BaseException] = []

    def work(name: str, driver: SoftDriver) -> None:
        try:
            with SessionHarness(zoo[name], driver=driver, kernel_ns=MS // 10, source=staged()) as harness:
                harness.install(zoo[name].floor_bytes)
                for _ in range(10):
                    harness.run(check=False)
                harness.check()
                harness.session.close()
                harness.close = lambda: None  # type: ignore[method-assign]  # the other's things are still alive
        except BaseException as error:
            failures.append(error)

    with SoftDriver(PAGE, 0, poison=True) as driver:
        threads = [threading.Thread(target=work, args=(name, driver)) for name in ("tied", "pairs")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert not driver.counts().alive()


# ---- stats and trace


def test_a_trace_has_every_copy_and_every_step(harness: SessionHarness) -> None:
    assert harness.plan is not None
    stream = harness.stream()
    harness.run(stream=stream)
    harness.session.start_trace()
    for _ in range(2):
        harness.run(stream=stream)
    spans = harness.session.stop_trace()
    copies = [span for span in spans if span.lane == "copy"]
    steps = [span for span in spans if span.lane == "compute"]
    assert sum(span.nbytes for span in copies) == 2 * harness.last.bytes_streamed
    assert [span.index for span in steps] == [*range(6), *range(6)]
    assert all(span.begin_ns <= span.end_ns for span in spans)
    with pytest.raises(PenstockError, match="no trace was started"):
        harness.session.stop_trace()


# ---- divergence


def test_another_access_than_the_recorded_one(harness: SessionHarness) -> None:
    harness.run()
    harness.begin()
    harness.acquire(0)
    with pytest.raises(RunFailed, match="position 1: expected access 1, got access 3") as failed:
        harness.acquire(3)
    assert type(failed.value.error) is ScheduleDivergedError
    for _ in range(2):
        harness.run()


def test_one_access_too_many(harness: SessionHarness) -> None:
    harness.begin()
    for _ in harness.steps():
        pass
    with pytest.raises(RunFailed, match="access 0 was fetched after the last recorded one"):
        harness.acquire(0)
    harness.run()


def test_another_step_than_the_recorded_one(harness: SessionHarness) -> None:
    harness.begin()
    harness.acquire(0)
    harness.done(1)
    with pytest.raises(ScheduleDivergedError, match="expected the end of step 0, got the end of step 1"):
        harness.end()
    harness.run()


@pytest.mark.parametrize("steps", [0, 3])
def test_too_few_accesses(harness: SessionHarness, steps: int) -> None:
    harness.begin()
    for number in range(steps):
        harness.acquire(number)
        harness.done(number)
    with pytest.raises(ScheduleDivergedError, match=f"expected 6 accesses and 6 steps, got {steps} and {steps}"):
        harness.end()
    harness.run()


def test_the_first_error_is_the_one_that_is_told(harness: SessionHarness) -> None:
    harness.begin()
    harness.done(5)
    harness.done(9)
    with pytest.raises(RunFailed, match="got the end of step 5"):
        harness.acquire(77)
    harness.run()


def test_a_run_that_is_given_up_by_its_caller(harness: SessionHarness) -> None:
    stream = harness.stream(late=True)
    harness.run(stream=stream)
    harness.begin(stream=stream)
    harness.read(harness.acquire(0), "w0", stream)
    assert harness.session.abort() is None
    harness._owner = None
    harness.run(stream=stream)


# ---- the order of calls


def test_methods_that_are_not_there(model: Model) -> None:
    with SessionHarness(model) as harness:
        with pytest.raises(PenstockError, match="method 0 was begun, there are 0"):
            harness.begin()
        harness.install(model.floor_bytes)
        for method in (-1, 1):
            with pytest.raises(PenstockError, match=f"method {method} was begun, there are 1"):
                harness.begin(method)
        harness.run()
        uninstall(harness.session)
        with pytest.raises(PenstockError, match="method 0 was begun, there are 0"):
            harness.begin()
        assert harness.driver.counts().block_bytes == 0


def test_a_plan_that_could_not_be_installed_leaves_none(model: Model) -> None:
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        harness.driver.fail_at(1, call="map")
        with pytest.raises(DriverCallError):
            harness.install(model.full_bytes)
        with pytest.raises(PenstockError, match="there are 0"):
            harness.begin()
        harness.install(model.floor_bytes)
        harness.run()


def test_no_other_plan_in_the_middle_of_a_run(harness: SessionHarness) -> None:
    harness.begin()
    for step in harness.steps():
        if step == 2:
            with pytest.raises(PenstockError, match="while a run has not ended"):
                harness.session.install((ctypes.c_int64 * 0)())
            with pytest.raises(PenstockError, match="while a run has not ended"):
                uninstall(harness.session)
    harness.end()
    harness.check()


def test_a_run_within_a_run_is_refused_and_the_outer_one_goes_on(harness: SessionHarness) -> None:
    stream = harness.stream(late=True)
    harness.begin(stream=stream)
    for step in harness.steps(stream=stream):
        if step == 2:
            with pytest.raises(PenstockError, match="while another one was not ended"):
                harness.session.begin(0, stream)
    harness.end()
    harness.check()
    harness.check_counters()
    harness.run(stream=stream)


def test_fetched_outside_of_a_run(harness: SessionHarness) -> None:
    for _ in range(2):
        assert acquire(harness.session, 0, ctypes.byref(ctypes.c_uint64()))
        harness.done(0)
        assert core().penstock_session_failure_text(harness.session.handle) == b"access 0 was fetched outside of a run"
        harness.run()


def test_ended_without_being_begun(harness: SessionHarness) -> None:
    with pytest.raises(PenstockError, match="ended that was not begun"):
        harness.session.end()
    harness.run()


def test_capture_is_refused_and_nothing_is_touched(harness: SessionHarness) -> None:
    stream = harness.stream()
    harness.run(stream=stream)
    harness.driver.set_capturing(stream, True)
    calls = harness.driver.calls()
    with pytest.raises(CaptureError, match="captured into a graph"):
        harness.begin(stream=stream)
    assert harness.driver.calls() == calls + 1  # whether it is capturing
    harness.driver.set_capturing(stream, False)
    # What had been copied ahead still is: a warm run.
    harness.run(stream=stream)


# ---- the weights file


@pytest.mark.parametrize("source", ["registered", "staged"])
@pytest.mark.parametrize("change", ["truncated", "touched", "longer"])
def test_a_file_that_changed_between_runs(model: Model, source: str, change: str) -> None:
    with SessionHarness(model, source=SOURCES[source]) as harness:
        harness.install(model.floor_bytes)
        harness.run()
        if change == "touched":
            os.utime(model.path, ns=(1, 1))
        else:
            os.truncate(model.path, model.file_bytes + (PAGE if change == "longer" else -PAGE))
        for _ in range(2):
            with pytest.raises(WeightsChangedError, match=str(model.path)):
                harness.begin()


@pytest.mark.parametrize("source", ["registered", "staged"])
@pytest.mark.parametrize("inline", [True, False])
def test_a_file_truncated_in_the_middle_of_a_run(model: Model, source: str, inline: bool) -> None:
    with SessionHarness(model, source=SOURCES[source]) as harness:
        harness.install(model.floor_bytes)
        stream = INLINE if inline else harness.stream()
        harness.run(stream=stream)

        def cut() -> None:
            harness.begin(stream=stream)
            for step in harness.steps(stream=stream):
                if step == 0:
                    os.truncate(model.path, PAGE)
            harness.end()
            harness.session.drain()

        with pytest.raises((WeightsChangedError, RunFailed)) as failed:
            cut()
        error = failed.value.error if isinstance(failed.value, RunFailed) else failed.value
        assert type(error) is WeightsChangedError
        with pytest.raises(WeightsChangedError, match="changed after it was loaded"):
            harness.begin(stream=stream)


def test_a_file_that_is_not_there(model: Model, tmp_path: Path) -> None:
    missing = Model(model.schedules, model.weights, model.offsets, tmp_path / "missing.ptd")
    with pytest.raises(WeightsChangedError, match="missing.ptd cannot be opened"):
        SessionHarness(missing, source=staged())
