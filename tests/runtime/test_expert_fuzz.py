"""Runs with experts that nobody thought of: other indices each time, on streams that are late or slow, as graphs in any
order of their nodes, given up anywhere, with calls that fail, under one plan after another."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DriverCallError
from tests.runtime.expert_harness import EXPERTS, ExpertHarness, layers
from tests.runtime.session_harness import INLINE, Captured, RunFailed

US = 1000


@dataclass(frozen=True)
class Action:
    # A method, or a graph of it.
    method: int
    stream: int
    # Of a replay: in which order its nodes run.
    order: int | None
    # The driver call from the run's start that fails, or the step behind which the run is given up.
    failing: int | None
    given_up: int | None


ACTIONS = st.builds(
    Action,
    method=st.integers(0, 1),
    stream=st.integers(0, 2),
    order=st.one_of(st.none(), st.integers(0, 3)),
    failing=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 45)),
    given_up=st.one_of(st.none(), st.none(), st.none(), st.none(), st.integers(0, 8)),
)


@dataclass(frozen=True)
class Case:
    slots: list[tuple[int, int]]
    actions: list[Action]
    rows: int
    poison: bool
    late_copies: bool
    seed: int


CASES = st.builds(
    Case,
    slots=st.lists(st.tuples(st.integers(0, EXPERTS), st.integers(0, EXPERTS)), min_size=1, max_size=2),
    actions=st.lists(ACTIONS, min_size=3, max_size=12),
    rows=st.sampled_from([1, 2, 3, 8, 40]),
    poison=st.booleans(),
    late_copies=st.booleans(),
    seed=st.integers(1, 1000),
)


def play(harness: ExpertHarness, case: Case, streams: list[int], graphs: list[Captured]) -> None:
    choose = random.Random(case.seed)
    for action in case.actions:
        stream = streams[action.stream]
        if action.failing is not None:
            harness.driver.fail_at(action.failing)
        try:
            if action.order is not None:
                # A graph needs a stream of its own.
                on = stream if stream != INLINE else streams[0]
                harness.replay(graphs[action.method], on, order=action.order, seed=case.seed, check=False)
            elif action.given_up is not None:
                harness.begin(action.method, stream)
                for step, _ in enumerate(harness.steps(action.method, stream)):
                    if step == action.given_up:
                        break
                harness.give_up()
            else:
                harness.run(action.method, stream, check=False)
        except (RunFailed, DriverCallError) as error:
            if "a test asked for this failure" not in str(error):
                raise
        harness.driver.fail_at(0)
        if choose.random() < 0.3:
            harness.check()
    harness.check()


@settings(max_examples=200)
@given(CASES)
def test_rows_and_counts_are_right_whatever_happens(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = layers(Path(folder))
        with ExpertHarness(model, rows=case.rows, poison=case.poison, seed=case.seed, kernel_ns=50 * US) as harness:
            streams = [harness.stream(), harness.stream(late=True), INLINE]
            for slots in case.slots:
                harness.install_plan(model.with_slots(*slots))
                graphs = [harness.capture(0), harness.capture(1)]
                harness.driver.set_delays(case.seed, 40 * US)
                if case.late_copies:
                    with harness.late_copies():
                        play(harness, case, streams, graphs)
                else:
                    play(harness, case, streams, graphs)
                harness.driver.set_delays(0, 0)
            harness.run(0, streams[1])
            harness.run(1, streams[0])
            harness.check()
