"""Modules in several threads: each at its own pace, and one module never in two at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import penstock
from penstock.errors import ClosedError, ConcurrentRunError
from penstock.runtime.plan_installer import FIRST_RUNS
from tests.runtime.modules import SCRIPTS, SETUPS, KeptDrivers, Watched, at_the_floor, hooks, play, same

ResidentBits = Callable[[str], list[list[Tensor]]]


class Gated:
    """A compiled method that stops before its first access, until it is let go."""

    def __init__(self, compiled: Callable[[Any], Any]) -> None:
        self._compiled = compiled
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self, inputs: Any) -> Any:
        self.entered.set()
        self.let_go.wait()
        return self._compiled(inputs)


@contextmanager
def held_inside(module: penstock.Module) -> Iterator[Callable[[], list[list[Tensor]]]]:
    """A run of the chain in another thread, inside the module; the call lets it go and gives its result."""
    runner = module._runners["forward"]
    compiled = runner.compiled
    gate = Gated(compiled)
    runner.compiled = gate
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(play, module.run_method, SCRIPTS["chain"][:1])
        gate.entered.wait()
        runner.compiled = compiled

        def finish() -> list[list[Tensor]]:
            gate.let_go.set()
            return run.result()

        try:
            yield finish
        finally:
            gate.let_go.set()


@pytest.mark.parametrize("setup", SETUPS)
def test_a_second_thread_is_refused_while_one_runs(
    setup: str, chain: Path, resident_bits: ResidentBits, kept: KeptDrivers
) -> None:
    with at_the_floor(chain, **SETUPS[setup]) as module:
        run = Watched(module)
        with held_inside(module) as finish:
            for _ in range(3):
                with pytest.raises(ConcurrentRunError, match="method 'forward' was called while another call"):
                    play(module.run_method, SCRIPTS["chain"][:1])
            assert same(finish(), resident_bits("chain")[:1])
        # The refused calls changed nothing.
        run.has_run("forward")
        run.check()
        assert same(play(run, SCRIPTS["chain"]), resident_bits("chain"))


def test_closing_waits_for_a_run_in_another_thread(chain: Path, resident_bits: ResidentBits, kept: KeptDrivers) -> None:
    module = at_the_floor(chain)
    closing = threading.Thread(target=module.close)
    with held_inside(module) as finish:
        closing.start()
        assert kept.last.counts().alive()
        assert same(finish(), resident_bits("chain")[:1])
        closing.join()
    assert not closing.is_alive() and not kept.last.counts().alive()
    with pytest.raises(ClosedError):
        module(*SCRIPTS["chain"][0][1])


def test_a_change_of_budget_waits_for_a_run_in_another_thread(chain: Path, resident_bits: ResidentBits) -> None:
    with at_the_floor(chain) as module:
        target = module.floor_bytes + 50_000
        changing = threading.Thread(target=module.set_budget, args=(target,))
        with held_inside(module) as finish:
            changing.start()
            assert module.budget_bytes == module.floor_bytes
            assert same(finish(), resident_bits("chain")[:1])
            changing.join()
        assert module.budget_bytes == target and module.device_memory()[1] <= target
        assert same(play(module.run_method, SCRIPTS["chain"]), resident_bits("chain"))


@pytest.mark.parametrize("change", ["set_budget", "calibrate", "first-runs"])
@pytest.mark.parametrize("between", ["a run", "close"])
def test_a_change_is_told_whatever_another_thread_does_as_soon_as_it_has_ended(
    change: str,
    between: str,
    chain: Path,
    resident_bits: ResidentBits,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It neither waits for the run that came next, nor asks a closed module what it has just done."""
    caplog.set_level("INFO", "penstock")
    first = SCRIPTS["chain"][:1]
    module = at_the_floor(chain, **({"calibration": "first-runs"} if change == "first-runs" else {}))
    budget = module.floor_bytes + 50_000
    module.set_budget(budget)
    if change == "first-runs":
        for _ in range(FIRST_RUNS):
            play(module.run_method, first)
    operation, changing_thread, steps = module._operation, threading.get_ident(), list[str]()
    with ExitStack() as stack:

        @contextmanager
        def followed(*, wait: bool = True) -> Iterator[None]:
            if threading.get_ident() == changing_thread:
                assert "ended" not in steps, "to tell what was done takes another operation"
            with operation(wait=wait):
                yield
            if steps == ["installed"]:
                steps.append("another thread's")
                if between == "a run":
                    stack.callback(stack.enter_context(held_inside(module)))
                else:
                    module.close()
                steps.append("ended")

        installs = {"set_budget": "change_budget", "calibrate": "plan_by", "first-runs": "plan_by_first_runs"}
        install = getattr(module._installer, installs[change])

        def noted(*arguments: Any) -> Any:
            result = install(*arguments)
            steps.append("installed")
            return result

        monkeypatch.setattr(module._installer, installs[change], noted)
        monkeypatch.setattr(module, "_operation", followed)
        caplog.clear()
        if change == "set_budget":
            module.set_budget(module.floor_bytes)
        elif change == "calibrate":
            with module.calibrate():
                play(module.run_method, first)
        else:
            module._before_run()
        assert steps[-1] == "ended"
        told = [record.getMessage() for record in caplog.records]
        assert any(line.startswith(f"{chain.name} on cpu: floor ") for line in told), told
        assert any("the first runs showed" in line for line in told) == (change == "first-runs")
    module.close()


def test_one_module_used_from_two_threads_in_turn(decoder: Path, resident_bits: ResidentBits) -> None:
    with at_the_floor(decoder) as module, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        run = Watched(module)
        for _ in range(5):
            module.reset_state()
            found = []
            for number, call in enumerate(SCRIPTS["decoder"]):
                found += (one, other)[number % 2].submit(play, run, [call]).result()
            assert same(found, resident_bits("decoder"))


def test_modules_in_threads_of_their_own(
    program_path: Callable[[str], Path], resident_bits: ResidentBits, kept: KeptDrivers
) -> None:
    """Of one file and of several, all policies, at once."""
    names = ["decoder", "decoder", "chain", "gate"]
    for name in names:
        resident_bits(name)
    setups = list(SETUPS.values())
    start = threading.Barrier(len(names))

    def many_runs(number: int) -> int:
        name = names[number]
        with at_the_floor(program_path(name), **setups[number % len(setups)]) as module:
            hooks(module).set_delays(number + 1, 20_000)
            run = Watched(module)
            start.wait()
            for _ in range(20):
                module.reset_state()
                assert same(play(run.run_on, SCRIPTS[name]), resident_bits(name))
            run.check()
            return run.runs

    with ThreadPoolExecutor(len(names)) as pool:
        counts = list(pool.map(many_runs, range(len(names))))
    assert counts == [20 * len(SCRIPTS[name]) for name in names]


def test_two_modules_take_turns_in_one_thread(decoder: Path, resident_bits: ResidentBits) -> None:
    with at_the_floor(decoder) as one, at_the_floor(decoder, placement="lru") as other:
        runs = Watched(one), Watched(other)
        found: tuple[list[list[Tensor]], ...] = ([], [])
        for call in SCRIPTS["decoder"]:
            for run, bits in zip(runs, found, strict=True):
                bits += play(run, [call])
        assert all(same(bits, resident_bits("decoder")) for bits in found)


def test_a_module_is_loaded_in_one_thread_and_closed_in_another(
    chain: Path, resident_bits: ResidentBits, kept: KeptDrivers
) -> None:
    with ThreadPoolExecutor(1) as pool:
        module = pool.submit(at_the_floor, chain).result()
    assert same(play(Watched(module), SCRIPTS["chain"]), resident_bits("chain"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(module.close).result()


def test_an_exception_in_one_thread_is_not_anothers(decoder: Path, chain: Path, resident_bits: ResidentBits) -> None:
    """The core keeps what went wrong by session: a failing neighbour does not show."""
    resident_bits("chain")
    with at_the_floor(decoder) as failing, at_the_floor(chain) as working, ThreadPoolExecutor(1) as pool:
        stop = threading.Event()

        def fail_often() -> int:
            count = 0
            while not stop.is_set() or not count:
                hooks(failing).fail_at(1 + count % 7, call="copy_to_device")
                try:
                    play(failing.run_method, SCRIPTS["decoder"][:2])
                except penstock.errors.DriverCallError:
                    count += 1
                failing.reset_state()
            return count

        failures = pool.submit(fail_often)
        run = Watched(working)
        for _ in range(20):
            assert same(play(run, SCRIPTS["chain"]), resident_bits("chain"))
        stop.set()
        assert failures.result() > 0
