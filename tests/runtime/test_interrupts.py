"""SIGINT at any moment of any operation: it has ended, or has not begun, and the module goes on as if nothing was."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import ClosedError, NotCopyableError
from penstock.native import core
from penstock.plan.calibration import Calibration
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.runtime.interrupts import HeldInterrupts, deliver_interrupt
from tests.runtime.interruption import (
    LATEST_S,
    Interrupter,
    LineCounter,
    Place,
    interrupted_at,
    is_pure,
    places,
    traced,
)
from tests.runtime.modules import SCRIPTS, KeptDrivers, check_memory, hooks, play, same
from tests.runtime.session_harness import INLINE, PAGE, SessionHarness, chain, write_model
from tests.threads import thread_count

SIGNALS = 2000

Bits = Callable[[str], list[list[Tensor]]]


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Also where a shell started the tests in the background, deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Subject:
    """A module with state, in the middle between its floor and everything, and what can be done with it."""

    def __init__(self, path: Path, folder: Path, expected: list[list[Tensor]]) -> None:
        self.path = path
        self._trace = folder / "trace.json"
        self._script = SCRIPTS["gate"]
        self._expected = expected
        with penstock.Module(path, "1GiB") as module:
            self.low = (module.floor_bytes + module.budget_bytes) // 2
            self.high = (self.low + module.budget_bytes) // 2
        self.module = self.load()

    def load(self) -> penstock.Module:
        return penstock.Module(self.path, self.low)

    def operations(self) -> dict[str, Callable[[], object]]:
        return {
            "run": self.run,
            "set_budget": self.set_budget,
            "calibrate": self.calibrate,
            "calibrate_direct": self.calibrate_direct,
            "trace": self.trace,
            "write_state": lambda: self.module.write_state("total", torch.ones(self._total.shape)),
            "read_state": lambda: self.module.read_state("total"),
            "reset_state": lambda: self.module.reset_state(),
            "figures": self.figures,
            "load": self.load_another,
            "close": self.close,
        }

    @property
    def _total(self) -> Tensor:
        return self.module.read_state("total")

    def run(self) -> None:
        method, arguments = self._script[0]
        self.module.run_method(method, *arguments)

    def set_budget(self) -> None:
        self.module.set_budget(self.high if self.module.budget_bytes == self.low else self.low)

    def calibrate(self) -> None:
        with self.module.calibrate():
            self.run()
            self.run()

    def calibrate_direct(self) -> None:
        if self.module.calibration is None:
            self.calibrate()
        with self.module.calibrate(in_place=True):
            self.run()
            self.run()

    def trace(self) -> None:
        with self.module.trace(self._trace):
            self.run()

    def figures(self) -> None:
        module = self.module
        _ = module.last_run, module.stats(), module.link, module.device_memory(), module.summary, module.plan

    def load_another(self) -> None:
        self.module.close()
        self.module = self.load()

    def close(self) -> None:
        self.module.close()

    def check(self) -> None:
        """Whatever came before: runs as it should, and holds what it says."""
        try:
            self.module.stats()
        except ClosedError:
            self.module = self.load()
        module = self.module
        assert module.budget_bytes in (self.low, self.high)
        module.reset_state()
        assert same(play(module.run_method, self._script), self._expected)
        check_memory(module, self.high)


@pytest.fixture
def subject(gate: Path, tmp_path: Path, resident_bits: Bits, kept: KeptDrivers) -> Iterator[Subject]:
    made = Subject(gate, tmp_path, resident_bits("gate"))
    yield made
    made.module.close()
    # Loads that were interrupted have closed their drivers, and left nothing in them: the fixture looks.


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def one_is_open(kept: KeptDrivers) -> None:
    """What an interrupted load made it has given back: all drivers but the present module's are closed and empty."""
    open_drivers = [driver for driver in kept.made if not driver.closed]
    assert len(open_drivers) == 1
    for driver in kept.made:
        if driver.closed:
            assert not hooks(driver).counts().alive()
            driver.destroy()
    kept.made[:] = open_drivers


OPERATIONS = (
    "run",
    "set_budget",
    "calibrate",
    "calibrate_direct",
    "trace",
    "write_state",
    "read_state",
    "reset_state",
    "figures",
    "load",
    "close",
)


PLANNING = ("set_budget", "calibrate", "calibrate_direct", "load")  # closing plans nothing


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning holds nothing, and has a test of its own below. Traced, it would take most of the time here."""
    plan = Planner.plan
    known: dict[tuple[str, int, bool, bool], Plan] = {}

    def once(planner: Planner, budget_bytes: int, calibration: Calibration | None = None) -> Plan:
        is_direct = calibration is not None and bool(calibration.direct_step_s)
        key = (planner._placement, budget_bytes, calibration is not None, is_direct)
        if key not in known:
            known[key] = plan(planner, budget_bytes, calibration)
        return known[key]

    monkeypatch.setattr(Planner, "plan", once)


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("name", OPERATIONS)
def test_at_every_line(subject: Subject, kept: KeptDrivers, name: str) -> None:
    _interrupt_at_every_line(subject, kept, name, lambda place: not is_pure(place))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNING)
def test_at_every_line_of_planning(subject: Subject, kept: KeptDrivers, name: str) -> None:
    _interrupt_at_every_line(subject, kept, name, is_pure)


def _interrupt_at_every_line(subject: Subject, kept: KeptDrivers, name: str, wanted: Callable[[Place], bool]) -> None:
    operation = subject.operations()[name]
    operation()
    subject.check()
    one_is_open(kept)
    gc.collect()  # what earlier tests have left goes now, and not while this one counts
    before = descriptors(), thread_count()
    interrupted = 0
    for place, at in places(operation):
        if not wanted(place):
            continue
        try:
            interrupted += interrupted_at(operation, place, at)
            subject.check()
        except Exception as error:
            raise AssertionError(f"{name} was interrupted at {place}, the {at}. time") from error
        one_is_open(kept)
    assert interrupted > 20
    gc.collect()
    assert (descriptors(), thread_count()) == before
    with penstock.Module(subject.path, subject.low) as module:
        assert same(play(module.run_method, SCRIPTS["gate"]), subject._expected)


@pytest.mark.parametrize("name", ["run", "trace", "read_state", "figures"])
def test_at_every_instruction(subject: Subject, name: str) -> None:
    operation = subject.operations()[name]
    operation()
    interrupted = 0
    for place, at in places(operation, opcodes=True):
        interrupted += interrupted_at(operation, place, at, opcodes=True)
        subject.check()
    assert interrupted > 100


@pytest.mark.slow
def test_signals_at_random_moments(subject: Subject, kept: KeptDrivers) -> None:
    """Real ones, from another thread. What must hold holds at any moment, so the times prove nothing but themselves."""
    operations = {name: each for name, each in subject.operations().items() if name != "close"}  # loads close, too
    subject.check()
    one_is_open(kept)
    gc.collect()  # what earlier tests have left goes now, and not while this one counts
    before = descriptors(), thread_count()
    sent = 0
    with Interrupter(seed=14) as interrupter:
        while sent < SIGNALS:
            for operation in operations.values():
                begin = time.perf_counter()
                operation()
                duration_s = time.perf_counter() - begin
                for _ in range(SIGNALS // len(operations) // 10):
                    interrupter.interrupt(operation, duration_s)
                    sent += 1
                    subject.check()
                    one_is_open(kept)
    assert sent >= SIGNALS
    gc.collect()
    assert (descriptors(), thread_count()) == before


def test_an_interrupt_in_a_finalizer_is_not_waited_for() -> None:
    """Python drops it, and no second one comes."""

    class Ends:
        def __del__(self) -> None:
            while True:
                pass

    ends = 0

    def operation() -> None:
        nonlocal ends
        ends += 1
        Ends()

    with Interrupter(seed=14) as interrupter:
        interrupter.interrupt(operation, LATEST_S)
    assert ends == 1


def test_a_run_that_ends_late_is_complete(subject: Subject) -> None:
    """An interrupt inside a run does not cost its state: it waits for the end."""
    module = subject.module
    module.reset_state()
    subject.run()
    after_one = subject._total
    module.reset_state()
    inside = [place for place in places(subject.run) if "captured" not in place[0][0]]
    module.reset_state()
    place, at = next(each for each in inside if each[0][0].endswith("loader.py"))
    assert interrupted_at(subject.run, place, at)
    assert torch.equal(subject._total, after_one)


def test_a_handler_that_does_not_raise(subject: Subject) -> None:
    """An application's own way with SIGINT stays its own: called once, after the operation."""
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        told = 0
        for place, at in places(subject.run):
            calls.clear()
            counter = LineCounter(place, at)
            with traced(counter):
                subject.run()
            assert calls == [signal.SIGINT] * counter.sent
            told += counter.sent
        assert told > 20
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    subject.check()


def test_waiting_for_another_thread_can_be_interrupted(subject: Subject) -> None:
    """It has not begun, so there is nothing to wait for."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with subject.module._operation():
            inside.set()
            leave.wait()

    other = threading.Thread(target=hold)
    other.start()
    inside.wait()
    main = threading.main_thread().ident
    assert main is not None
    interrupter = threading.Thread(target=lambda: signal.pthread_kill(main, signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupter.start()
            subject.module.stats()
    finally:
        leave.set()
        other.join()
        interrupter.join()
    subject.check()


def test_the_hold() -> None:
    def raised(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, raised)
    try:
        done = False
        with pytest.raises(KeyboardInterrupt):
            with HeldInterrupts():
                with HeldInterrupts():  # does nothing of its own
                    signal.raise_signal(signal.SIGINT)
                done = True
        assert done and signal.getsignal(signal.SIGINT) is raised
        # Where it may be delivered it is, once.
        with HeldInterrupts():
            deliver_interrupt()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                deliver_interrupt()
            deliver_interrupt()
        # Another thread is never interrupted, and holds nothing.
        thread = threading.Thread(target=lambda: HeldInterrupts().__enter__())
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is raised
        # What another has set stays.
        with HeldInterrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        with HeldInterrupts():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_child_is_interrupted_as_ever() -> None:
    with HeldInterrupts():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


# ---- the session under it


def test_a_begin_that_is_interrupted_leaves_no_run(tmp_path: Path) -> None:
    names = [f"w{i}" for i in range(6)]
    model = write_model(tmp_path / "w.ptd", [chain(*names)], dict.fromkeys(names, 2 * PAGE))
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)

        def begin() -> None:
            harness.session.begin(0, INLINE)

        found = places(begin)
        harness.session.abort()
        interrupted = 0
        for place, at in found:
            interrupted += interrupted_at(begin, place, at)
            harness.run(check=False)
            harness.check()
        assert interrupted == len(found)


def test_closing_gives_up_a_run_that_nobody_ended(tmp_path: Path) -> None:
    """Compiled code that would go on finds no session, and not one that is gone."""
    names = [f"w{i}" for i in range(6)]
    model = write_model(tmp_path / "w.ptd", [chain(*names)], dict.fromkeys(names, 2 * PAGE))
    harness = SessionHarness(model)
    harness.install(model.floor_bytes)
    harness.session.begin(0, INLINE)
    harness.close()
    core().penstock_done(0)
    assert core().aoti_torch_cpu_penstock_weight(0, None, 0, 0, 0, 0, None) == 1


def test_copies_are_refused(subject: Subject) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError, match="load it once more"):
            attempt(subject.module)
