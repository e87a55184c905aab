"""Plays scenarios against mutants, each in a process that is forked for it: a mutant may end its process.

`python -m tests.runtime.mutant_plays FUNCTION:NUMBER...` prints, for each mutant, its number and the scenario that
missed what was done to it; "survived" when none did. The core as it is goes first, and must pass.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.runtime.scenarios import SCENARIOS, play
from tests.runtime.soft import library

# Far more than all scenarios take, and measured in what they take here. What hangs has been noticed.
PATIENCE = 8
LEAST_S = 5.0


@dataclass(frozen=True)
class Plays:
    names: Iterable[str]
    # Raises what goes wrong.
    play: Callable[[str], object]
    # The one with the mutants.
    library: Callable[[], ctypes.CDLL]
    # Once the process that played has ended.
    clear: Callable[[], object] = lambda: None


CORE = Plays(SCENARIOS, play, library)


def missed(plays: Plays, number: int, first: str, limit_s: float) -> str:
    """The play that goes wrong. Tried first: the one that did for another mutant of the same function."""
    names = sorted(plays.names, key=lambda name: name != first)  # stable
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        ctypes.c_int.in_dll(plays.library(), "penstock_mutant").value = number
        for name in names:
            os.write(into, name.encode() + b"\n")
            try:
                plays.play(name)
            except BaseException:
                os._exit(1)
        os.write(into, b"survived\n")
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as told:
        played = told.read().split()
    os.waitpid(child, 0)
    plays.clear()
    return played[-1]


def tell_missed(plays: Plays, arguments: Iterable[str], limit_s: float) -> None:
    last: dict[str, str] = {}
    for argument in arguments:
        function, number = argument.rsplit(":", 1)
        name = missed(plays, int(number), last.get(function, ""), limit_s)
        last[function] = name
        print(number, name, flush=True)


if __name__ == "__main__":
    # Also so that each mutant finds its plans made.
    for name in SCENARIOS:
        play(name)
    begun_s = time.monotonic()
    for name in SCENARIOS:
        play(name)
    tell_missed(CORE, sys.argv[1:], max(LEAST_S, PATIENCE * (time.monotonic() - begun_s)))
