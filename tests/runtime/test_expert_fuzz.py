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
from tests.runtime.expert_rig import EXPERTS, ExpertRig, layers
from tests.runtime.rig import INLINE, Captured, RunFailed

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


def play(rig: ExpertRig, case: Case, streams: list[int], graphs: list[Captured]) -> None:
    choose = random.Random(case.seed)
    for action in case.actions:
        stream = streams[action.stream]
        if action.failing is not None:
            rig.driver.fail_at(action.failing)
        try:
            if action.order is not None:
                # A graph needs a stream of its own.
                on = stream if stream != INLINE else streams[0]
                rig.replay(graphs[action.method], on, order=action.order, seed=case.seed, check=False)
            elif action.given_up is not None:
                rig.begin(action.method, stream)
                for step, _ in enumerate(rig.steps(action.method, stream)):
                    if step == action.given_up:
                        break
                rig.give_up()
            else:
                rig.run(action.method, stream, check=False)
        except (RunFailed, DriverCallError) as error:
            if "a test asked for this failure" not in str(error):
                raise
        rig.driver.fail_at(0)
        if choose.random() < 0.3:
            rig.check()
    rig.check()


@settings(max_examples=200)
@given(CASES)
def test_rows_and_counts_are_right_whatever_happens(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = layers(Path(folder))
        with ExpertRig(model, rows=case.rows, poison=case.poison, seed=case.seed, kernel_ns=50 * US) as rig:
            streams = [rig.stream(), rig.stream(late=True), INLINE]
            for slots in case.slots:
                rig.install_plan(model.with_slots(*slots))
                graphs = [rig.capture(0), rig.capture(1)]
                rig.driver.set_delays(case.seed, 40 * US)
                if case.late_copies:
                    with rig.late_copies():
                        play(rig, case, streams, graphs)
                else:
                    play(rig, case, streams, graphs)
                rig.driver.set_delays(0, 0)
            rig.run(0, streams[1])
            rig.run(1, streams[0])
            rig.check()
