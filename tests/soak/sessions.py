"""One session: a program is loaded, things are done to it, and after each of them everything must be as it should."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import penstock
from penstock import errors
from penstock.runtime.module import POISON_VARIABLE
from tests.runtime.modules import EVERYTHING, hooks
from tests.runtime.soft import Failure, SoftHooks
from tests.runtime.test_driver_faults import QUIET
from tests.soak.interrupts import Outcome
from tests.soak.programs import Kind, load_options
from tests.soak.reference import Reference
from tests.soak.subject import Subject, Wrong, copied, gpu_bytes, is_asked_for, require
from tests.soak.world import World, descriptors, threads

# Every call that the core makes and that can fail. Those that are made often come first and are drawn more often.
CALLS = (
    *("record", "wait", "copy_to_device", "is_capturing", "synchronize_event", "synchronize_stream") * 3,
    *("create_event", "create_stream", "create_block", "reserve", "map", "allow_access", "fill", "elapsed_ns") * 2,
    *("register_host", "allocate_host", "create_pool", "pool_allocate", "pool_release", "destroy_pool"),
    *("destroy_event", "destroy_stream", "release_block", "unreserve", "unmap", "unregister_host", "free_host"),
)


class Session:
    """Everything is drawn from `draw`; what is done is logged before it is done."""

    def __init__(self, world: World, draw: Random) -> None:
        self.world = world
        self.draw = draw
        self.kind: Kind = draw.choice(world.kinds)
        self.reference: Reference = world.references[self.kind.name]
        self.options: dict[str, Any] = load_options(self.kind, world.device, draw)
        self.folder = world.scratch / "session"
        self._subject: Subject | None = None
        # How much of it goes wrong: some sessions are calm, so that long runs of runs are in it too.
        self._turmoil = draw.choice((0.0, 0.2, 0.5))
        self._slow_ns = draw.choice((0, 0, 20_000)) if world.device == "cpu" else 0

    @property
    def subject(self) -> Subject:
        assert self._subject is not None, "loaded"
        return self._subject

    @property
    def module(self) -> penstock.Module:
        return self.subject.module

    # ---- from beginning to end

    def play(self, actions: Sequence[tuple[int, Callable[[Session], None]]]) -> None:
        world, draw = self.world, self.draw
        world.begin_session()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.path = copied(world.paths[self.kind.name], self.folder)
        poison = draw.random() < 0.4
        os.environ[POISON_VARIABLE] = str(int(poison))
        self.say(f"{self.kind.name} {self.options} poison={poison} slow_ns={self._slow_ns}")
        before, threads_before = descriptors(), threads()
        try:
            self.load()
            weights, bodies = zip(*actions, strict=True)
            for _ in range(draw.randint(10, 40)):
                body = draw.choices(bodies, weights)[0]
                body(self)
                if self._subject is None:
                    self.load()
                self.subject.check_memory()
            self.close()
        finally:
            os.environ[POISON_VARIABLE] = "0"
        self.check_leaks(before, threads_before)
        world.tally["sessions"] += 1

    def say(self, text: str) -> None:
        self.world.log(text)

    def check_leaks(self, before: dict[str, str], threads_before: int) -> None:
        world = self.world
        world.drivers.check()
        world.drivers.destroy()
        after = descriptors()
        if set(after) != set(before) or threads() != threads_before:
            gc.collect()  # what is in a cycle goes late, but it goes
            after = descriptors()
        leaked = {number: name for number, name in after.items() if number not in before}
        world.tally["leaks"] += len(leaked) + max(0, threads() - threads_before)
        require(not leaked, "descriptors leaked:", leaked)
        require(threads() <= threads_before, "threads:", threads(), "before:", threads_before)

    # ---- with an interrupt or a fault somewhere inside, or without

    def do(self, operation: str, body: Callable[[], Any], driver: SoftHooks | None = None) -> Outcome:
        """`driver`: where a call may be made to fail; None: nowhere."""
        draw, tally = self.draw, self.world.tally
        if draw.random() >= self._turmoil:
            self.say(operation)
            return _attempt(body)
        if driver is None or draw.random() < 0.5:
            self.say(f"{operation}, interrupted")
            outcome = self.world.interrupter.run(operation.split()[0], body, draw)
            tally["interrupts delivered"] += outcome.interrupted
            tally[f"interrupt {operation.split()[0]}"] += outcome.interrupted
            return outcome
        call, countdown = draw.choice(CALLS), int(10 ** draw.uniform(0, 1.5))
        self.say(f"{operation}, {call} number {countdown} fails")
        driver.fail_at(countdown, Failure.NONE, call)
        outcome = _attempt(body)
        failed = driver.failed_call()
        driver.fail_at(0)
        if failed:
            tally["faults injected"] += 1
            tally[f"fault {failed}"] += 1
            quiet = failed in QUIET and outcome.error is None
            require(quiet or outcome.error is not None, "nobody was told that", failed, "failed")
        return outcome

    def expect(self, outcome: Outcome, *allowed: type[Exception]) -> bool:
        """Whether it was cut short, by an interrupt or an error that is as it should be."""
        error = outcome.error
        if error is not None:
            if not is_asked_for(error) and not isinstance(error, allowed):
                raise Wrong(f"{type(error).__name__}: {error}") from error
            self.world.tally["errors as they should be"] += 1
            self.world.tally[f"error {type(error).__name__}"] += 1
        return outcome.interrupted or error is not None

    def refused(self, allowed: type[Exception], body: Callable[[], Any]) -> None:
        outcome = _attempt(body)
        require(outcome.error is not None, "was not refused with", allowed.__name__)
        self.expect(outcome, allowed)

    # ---- loading and closing

    def budget(self) -> int | str:
        floor, full = self.floor_and_full()
        return self.draw.choice((floor, floor, full, EVERYTHING, *(self.draw.randint(floor, full) for _ in range(6))))

    def floor_and_full(self) -> tuple[int, int]:
        known = self.world.floors
        key = repr((self.kind.name, sorted(self.options.items())))
        if key not in known:
            with penstock.Module(self.path, EVERYTHING, **self.options) as module:
                known[key] = module.floor_bytes, module.full_bytes
        return known[key]

    def load(self) -> None:
        """Until it succeeds."""
        budget = self.budget()
        while True:
            drivers = self.world.drivers
            before_bytes = gpu_bytes() if self.world.device == "cuda" else None
            fault = self._fault_of_load()
            loaded: list[penstock.Module] = []
            # Interrupted behind its end, the module is nobody's, and closes itself.
            outcome = self.do(f"load at {budget}{fault}", lambda: penstock.Module(self.path, budget, **self.options))
            if outcome.finished:
                loaded.append(outcome.value)
            outcome.value = None
            self.expect(outcome)
            if fault and outcome.error is not None:
                self.world.tally["faults injected"] += 1
                self.world.tally["fault of a load"] += 1
            if loaded:
                self.world.tally["loads"] += 1
                break
            require(all(driver.closed for driver in drivers.made), "a load that failed left its driver open")
            drivers.check()
        if self.world.device == "cpu":
            driver = hooks(loaded[0])
            driver.fail_at(0)
            driver.set_delays(self.draw.randint(1, 1 << 30), self._slow_ns)
        self._subject = Subject(loaded[0], self.reference, before_bytes)
        self.subject.check_memory()

    def _fault_of_load(self) -> str:
        if self.world.device != "cpu" or self.draw.random() >= 0.3 * self._turmoil:
            return ""
        call, countdown = self.draw.choice(CALLS), int(10 ** self.draw.uniform(0, 1.2))
        self.world.drivers.fail_at(countdown, call)
        return f" with {call} number {countdown} failing"

    def close(self, *, faults: bool = True) -> None:
        """And everything is gone; unless this was interrupted, then the second time."""
        subject, module = self.subject, self.module
        driver = subject.driver if faults and self.world.device == "cpu" else None
        self._subject = None
        outcome = self.do("close", module.close, driver)
        require(outcome.error is None, "close() raised", outcome.error)
        if outcome.interrupted:
            module.close()
        subject.check_closed()
        self.refused(errors.ClosedError, lambda: module.run_method(*self.kind.calls[0][:1], *self.kind.calls[0][1]))
        self.gone()

    def drop(self) -> None:
        gc.collect()  # errors of this session have seen it, and are in cycles with their own frames
        self._subject = None
        self.gone()

    def gone(self) -> None:
        self.world.drivers.check()
        self.world.tally["closes"] += 1

    # ---- runs

    def calls(self, count: int, kind: Kind | None = None) -> list[int]:
        return [self.draw.randrange(len((kind or self.kind).calls)) for _ in range(count)]

    def finished_runs(self, outcome: Outcome, *allowed: type[Exception], replanned: bool = False) -> None:
        """After subject.run(): whatever happened to it."""
        subject = self.subject
        cut_short = self.expect(outcome, *allowed)
        runs, replays = subject.finish(cut_short=cut_short, replanned=replanned)
        self.world.tally["program runs"] += runs
        self.world.tally["replays"] += replays
        if cut_short:
            subject.settle_state(subject.state, may_be_invalid=True)

    def in_thread(self, body: Callable[[], Any]) -> Callable[[], Outcome]:
        """Starts it; the call waits for it."""
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(_attempt(body)))
        thread.start()

        def join() -> Outcome:
            thread.join()
            return outcomes[0]

        return join


def _attempt(body: Callable[[], Any]) -> Outcome:
    outcome = Outcome()
    try:
        outcome.value = body()
        outcome.finished = True
    except Exception as error:
        outcome.error = error
    return outcome


def session_of(world: World, seed: int, number: int) -> Session:
    return Session(world, Random(f"{seed}/{number}"))
