"""A slice of the soak: the same sessions each time, with interrupts at lines instead of moments."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.conftest import program_path  # noqa: F401
from tests.soak.actions import ACTIONS
from tests.soak.interrupts import Line
from tests.soak.sessions import session_of
from tests.soak.world import World

SEED, SESSIONS = 14, 12
KINDS = ("chain", "gate", "decoder")


@pytest.fixture
def own_interrupts() -> Iterator[None]:
    earlier = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.mark.usefixtures("own_interrupts")
def test_the_same_sessions(program_path: Callable[[str], Path], tmp_path: Path) -> None:  # noqa: F811
    compiled = {program_path(name).parent.parent for name in KINDS}
    log: list[str] = []
    with World("cpu", compiled.pop(), tmp_path, Line(), log.append) as world:
        for number in range(SESSIONS):
            log.clear()
            try:
                session_of(world, SEED, number).play(ACTIONS)
            except Exception as error:
                pytest.fail("\n  ".join([f"session {number}: {error}", *log]))
    assert world.tally["sessions"] == SESSIONS
    assert world.tally["program runs"] > 1000
    assert world.tally["interrupts delivered"] > 20 and world.tally["faults injected"] > 2
    assert world.tally["leaks"] == 0
