"""Schedules, sizes and budgets that nobody thought of, through the planner and the session."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DriverCallError
from penstock.plan.floor import floor_bytes
from penstock.schedule import Access, Schedule, Step
from tests.native.session import HostSource
from tests.runtime.session_harness import INLINE, PAGE, Model, RunFailed, SessionHarness, staged, write_model

US = 1000


@st.composite
def schedules(draw: st.DrawFn, names: list[str], method: str) -> Schedule:
    """Steps fetch weights anew, and some read again what earlier steps fetched."""
    accesses: list[Access] = []
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 8))):
        first = len(accesses)
        for name in draw(st.lists(st.sampled_from(names), min_size=0 if accesses else 1, max_size=3)):
            accesses.append(Access(len(accesses), name, pinned=draw(st.integers(0, 19)) == 0))
        numbers = list(range(first, len(accesses)))
        if first and (not numbers or draw(st.booleans())):
            numbers.append(draw(st.integers(0, first - 1)))
        steps.append(Step(f"k{index}", tuple(numbers)))
    return Schedule(method, tuple(accesses), tuple(steps))


@dataclass(frozen=True)
class Case:
    sizes: dict[str, int]
    schedules: list[Schedule]
    # Of the way from the floor to everything.
    budget_part: float
    # Method, stream and, for some, the driver call from the run's start that fails.
    runs: list[tuple[int, int, int | None]]
    seed: int
    poison: bool

    def model(self, folder: Path) -> Model:
        return write_model(folder / "weights.ptd", self.schedules, self.sizes, self.seed)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nbytes = st.one_of(st.integers(0, 3), st.integers(1, 300), st.integers(1, 4 * PAGE), st.sampled_from([PAGE]))
    sizes = {f"w{i}": size for i, size in enumerate(draw(st.lists(nbytes, min_size=1, max_size=9)))}
    count = draw(st.integers(1, 3))
    made = [draw(schedules(list(sizes), f"method{index}")) for index in range(count)]
    failing = st.one_of(st.none(), st.none(), st.none(), st.integers(1, 40))
    run = st.tuples(st.integers(0, count - 1), st.integers(0, 2), failing)
    return Case(
        sizes=sizes,
        schedules=made,
        budget_part=draw(st.sampled_from([0.0, 0.0, 0.2, 0.5, 0.8, 1.0])),
        runs=draw(st.lists(run, min_size=2, max_size=10)),
        seed=draw(st.integers(1, 1000)),
        poison=draw(st.booleans()),
    )


def play(harness: SessionHarness, case: Case) -> None:
    streams = [harness.stream(), harness.stream(), INLINE]
    harness.driver.set_delays(case.seed, 60 * US)
    for method, stream, failing in case.runs:
        if failing is not None:
            harness.driver.fail_at(failing)
        try:
            harness.run(method, streams[stream], check=False)
        except (RunFailed, DriverCallError) as error:
            if "a test asked for this failure" not in str(error):
                raise
        harness.driver.fail_at(0)
    harness.check()


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([None, staged(1000, 2, 1), staged(PAGE, 3, 3)]))
def test_planned(case: Case, source: HostSource | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = case.model(Path(folder))
        spare = model.full_bytes - model.floor_bytes
        budget = model.floor_bytes + int(spare * case.budget_part)
        with SessionHarness(model, source=source, poison=case.poison, seed=case.seed, kernel_ns=100 * US) as harness:
            harness.install(budget)
            play(harness, case)
            harness.run(case.runs[-1][0])
            harness.check_memory(budget)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_lru(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = case.model(Path(folder))
        pinned = {access.weight for schedule in case.schedules for access in schedule.accesses if access.pinned}
        floor = floor_bytes(model.schedules, model.weights, granularity_bytes=PAGE)
        # Each pinned weight has pages of its own in a pool; the floor packs them.
        held = sum(-(-case.sizes[name] // PAGE) * PAGE for name in pinned)
        budget = floor.transient_bytes + held + int(8 * case.budget_part) * PAGE
        with SessionHarness(model, lru=True, poison=case.poison, seed=case.seed, kernel_ns=100 * US) as harness:
            harness.install_lru(budget)
            play(harness, case)
            harness.run(case.runs[-1][0])
            harness.check()
            assert harness.session.memory()[1] <= budget


@settings(max_examples=250, deadline=None)
@given(cases(), st.data())
def test_replays(case: Case, data: st.DataObject) -> None:
    """Of the runs some are replays, in any order of their nodes; calls fail in both."""
    with tempfile.TemporaryDirectory() as folder:
        model = case.model(Path(folder))
        budget = model.floor_bytes + int((model.full_bytes - model.floor_bytes) * case.budget_part)
        with SessionHarness(model, poison=case.poison, seed=case.seed, kernel_ns=100 * US) as harness:
            harness.install(budget)
            streams = [harness.stream(), harness.stream(), harness.stream()]
            graphs = [harness.capture(method) for method in range(len(case.schedules))]
            harness.driver.set_delays(case.seed, 60 * US)
            for method, stream, failing in case.runs:
                order = data.draw(st.integers(-1, 3))
                if failing is not None:
                    harness.driver.fail_at(failing)
                try:
                    if order < 0:
                        harness.run(method, streams[stream], check=False)
                    else:
                        harness.replay(graphs[method], streams[stream], order=order, seed=case.seed, check=False)
                except (RunFailed, DriverCallError) as error:
                    if "a test asked for this failure" not in str(error):
                        raise
                harness.driver.fail_at(0)
            harness.check()
            harness.replay(graphs[case.runs[-1][0]], streams[0])
            harness.check_memory(budget)
