"""Every driver call made to fail in turn, and every allocation made to find no memory: the right error, nothing leaked,
and the very next attempt works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from penstock import errors
from penstock.plan.floor import floor_bytes
from tests.native.session import HostSource
from tests.runtime.session_harness import INLINE, MS, PAGE, Model, RunFailed, SessionHarness, chain, staged, write_model
from tests.runtime.soft import Failure, SoftDriver

T = TypeVar("T")

# What each call's failure is told as; all others are DriverCallError.
CLASSES: dict[str, type[errors.PenstockError]] = {
    "create_block": errors.DeviceMemoryError,
    "create_pool": errors.DeviceMemoryError,
    "pool_allocate": errors.DeviceMemoryError,
    "register_host": errors.RegistrationError,
    "allocate_host": errors.RegistrationError,
}
# Calls that give back, or that wait and poison before giving back: nobody is there to be told of their failure.
QUIET = {
    *("release_block", "unreserve", "unmap", "destroy_event", "destroy_stream", "destroy_pool", "pool_release"),
    *("unregister_host", "free_host", "destroy_graph", "synchronize_stream", "synchronize_event", "fill"),
    # In a run: what a pool refuses once, it may have once copies have ended.
    "pool_allocate",
}
SETUPS = ["planned", "planned staged", "lru"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    names = [f"w{i}" for i in range(6)]
    sizes = {**dict.fromkeys(names, 2 * PAGE - 100), "p": 50}
    schedules = [chain("!p", *names, "w0"), chain("w4", "w2", "w0", "w1", "w5", method="other")]
    return write_model(tmp_path_factory.mktemp("faults") / "weights.ptd", schedules, sizes)


def floor_of(model: Model, lru: bool) -> int:
    if not lru:
        return model.floor_bytes
    return floor_bytes(model.schedules, model.weights, granularity_bytes=PAGE).floor_bytes


@dataclass
class Life:
    """A session from its creation to its end. Whatever fails is tried once more, and must then succeed."""

    model: Model
    setup: str
    driver: SoftDriver
    poison: bool = True
    kernel_ns: int = 0
    short: bool = False
    raised: list[errors.PenstockError] = field(default_factory=list)

    @property
    def lru(self) -> bool:
        return self.setup == "lru"

    @property
    def most_bytes(self) -> int:
        return self.model.floor_bytes + 2 * PAGE

    def live(self, stream: int) -> None:
        source = staged(2 * PAGE, 2, 1) if "staged" in self.setup else None
        harness = self._twice(lambda: self._harness(source))
        try:
            floor = floor_of(self.model, self.lru)
            self._twice(lambda: self._install(harness, floor))
            for method, where in ((0, stream), (0, stream), (1, stream), (0, INLINE)):
                self._twice(lambda: self._run(harness, method, where))  # noqa: B023
                if self.short:
                    return
            self._twice(harness.session.stats if self.lru else harness.check_counters)
            self._twice(lambda: self._install(harness, floor + 2 * PAGE))
            self._twice(harness.session.start_trace)
            self._twice(lambda: self._run(harness, 0, stream))
            self._twice(lambda: self._stop_trace(harness))
        finally:
            harness.session.close()

    def _harness(self, source: HostSource | None) -> SessionHarness:
        return SessionHarness(
            self.model,
            lru=self.lru,
            source=source,
            driver=self.driver,
            poison=self.poison,
            kernel_ns=self.kernel_ns,
        )

    def _install(self, harness: SessionHarness, budget_bytes: int) -> None:
        if self.lru:
            harness.install_lru(budget_bytes)
        else:
            plan = harness.install(budget_bytes)
            assert self.driver.counts().block_bytes == plan.device_bytes

    def _stop_trace(self, harness: SessionHarness) -> None:
        try:
            assert harness.session.stop_trace()
        except errors.PenstockError:
            # A trace that could not be read is gone; there is another.
            harness.session.start_trace()
            self._run(harness, 0, INLINE)
            raise

    def _run(self, harness: SessionHarness, method: int, stream: int) -> None:
        try:
            harness.run(method, stream, check=False)
        except RunFailed as failed:
            raise failed.error from failed
        finally:
            # What a failed run has launched must have read the right bytes too.
            harness.await_kernels(stream)
            harness.check_hashes()

    def _twice(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except errors.PenstockError as error:
            self.raised.append(error)
        return action()


def live_and_fail(
    model: Model,
    setup: str,
    n: int,
    *,
    poison: bool = True,
    failure: Failure = Failure.NONE,
    call: str = "",
    kernel_ns: int = 0,
    copy_ns: int = 0,
    kind: type[Life] = Life,
) -> str:
    """Returns the name of the call that failed; empty when there were not as many."""
    with SoftDriver(PAGE, 0, poison) as driver:
        stream = driver.create_stream()
        driver.set_delays(n, copy_ns)
        driver.fail_at(n, failure, call)
        life = kind(model, setup, driver, poison=poison, kernel_ns=kernel_ns)
        life.live(stream)
        failed = driver.failed_call()
        driver.fail_at(0)
        # A new session on the same driver, and nothing left of the two.
        kind(model, setup, driver, poison=poison, short=True).live(stream)
        driver.destroy_stream(stream)
        assert not driver.counts().alive(), failed
        assert driver.counts().peak_block_bytes <= life.most_bytes
    if failed and not (failed in QUIET and not life.raised):
        assert len(life.raised) == 1, (failed, life.raised)
        assert "a test asked for this failure" in str(life.raised[0])
        if failure == Failure.STICKY:
            assert type(life.raised[0]) is errors.StickyDeviceError
        # A staging buffer is its memory and its event.
        elif failed == "create_event" and "staging" in str(life.raised[0]):
            assert type(life.raised[0]) is errors.RegistrationError
        else:
            assert type(life.raised[0]) is CLASSES.get(failed, errors.DriverCallError), failed
    return failed


@pytest.mark.parametrize("setup", SETUPS)
def test_every_driver_call_fails_in_turn(model: Model, setup: str) -> None:
    seen: set[str] = set()
    n = 1
    while failed := live_and_fail(model, setup, n):
        seen.add(failed)
        n += 1
    assert n > 300
    memory = {"create_pool", "pool_allocate", "pool_release", "destroy_pool"}
    if setup != "lru":
        memory = {"create_block", "reserve", "map", "allow_access", "unmap", "unreserve", "release_block"}
    host = {"allocate_host", "free_host"} if "staged" in setup else {"register_host", "unregister_host"}
    always = {"record", "wait", "copy_to_device", "synchronize_stream", "synchronize_event", "is_capturing"}
    made = {"create_stream", "destroy_stream", "create_event", "destroy_event", "elapsed_ns"}
    assert seen >= memory | host | always | made


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("call", ["synchronize_stream", "synchronize_event"])
def test_a_wait_that_fails_does_not_let_go_of_what_is_in_use(model: Model, setup: str, call: str) -> None:
    """Slow kernels and slow copies: giving memory back too early would be read, or end the process."""
    n = 1
    while live_and_fail(model, setup, n, call=call, kernel_ns=MS, copy_ns=MS // 4, poison=bool(n // 2 % 2)):
        n += 1 if call == "synchronize_stream" else 3
    assert n > 3


@pytest.mark.parametrize("setup", SETUPS)
def test_a_lost_device_is_told_as_such_and_closing_goes_on(model: Model, setup: str) -> None:
    n = 1
    while live_and_fail(model, setup, n, failure=Failure.STICKY, call="copy_to_device"):
        n += 7
    assert n > 7


@pytest.mark.parametrize("setup", SETUPS)
def test_no_device_memory_at_every_allocation(model: Model, setup: str) -> None:
    """All but so much of the device belongs to somebody else; once that is given back, the same session works."""
    lru = setup == "lru"
    floor = floor_of(model, lru)
    refused: list[int] = []
    with SoftDriver(PAGE, floor, poison=True) as driver:
        for free_bytes in range(0, floor, PAGE):
            hog = driver.create_block(floor - free_bytes)
            harness = SessionHarness(model, lru=lru, driver=driver, source=staged() if "staged" in setup else None)
            install = harness.install_lru if lru else harness.install
            try:
                install(floor)
                harness.run()
            except (errors.DeviceMemoryError, RunFailed) as failed:
                error = failed.error if isinstance(failed, RunFailed) else failed
                assert type(error) is errors.DeviceMemoryError and "bytes" in str(error)
                refused.append(free_bytes)
                assert driver.counts().block_bytes == floor - free_bytes
            driver.release_block(hog)
            install(floor)
            harness.run()
            harness.check()
            harness.close()
    assert refused == list(range(0, floor, PAGE))
