"""Interrupts for tests: real signals, at every line that an operation executes, or at any time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import penstock

# Lines of ours, and of contextlib, which runs between ours and the caller's `with`.
_FOLDERS = (str(Path(penstock.__file__).parent), contextlib.__file__)

Place = tuple[str, int]


class LineCounter:
    """Counts the lines of ours that are executed, by place; at one of them, the `at`-th time, it sends SIGINT.

    The signal is a real one: its handler, whichever it is then, is called before the line is executed.
    """

    def __init__(self, place: Place | None = None, at: int = 1, *, opcodes: bool = False) -> None:
        self.seen: dict[Place, int] = {}
        self.sent = False
        self._place = place
        self._at = at
        self._opcodes = opcodes
        self._event = "opcode" if opcodes else "line"

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            # Of a place that is known only its own file is looked at: tracing is slow.
            if not frame.f_code.co_filename.startswith(_FOLDERS if self._place is None else self._place[0]):
                return None
            frame.f_trace_opcodes = self._opcodes
            return self
        if event == self._event:
            place = (frame.f_code.co_filename, frame.f_lasti if self._opcodes else frame.f_lineno)
            times = self.seen[place] = self.seen.get(place, 0) + 1
            if place == self._place and times == self._at and not self.sent:
                self.sent = True
                signal.raise_signal(signal.SIGINT)
        return self


class traced:
    """Not made by contextlib, whose lines are looked at."""

    def __init__(self, counter: LineCounter) -> None:
        self._counter = counter

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._counter)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)


# Rooms and files that hold nothing: they plan, read descriptions, or look things up.
_PURE = (
    *("/plan/", "/weights/", "/program", "/schedule.py", "/weight.py", "/schema.py", "/archive.py", "/sealed_text.py"),
    *("/nesting.py", "/printable.py", "/regular_file.py", "/layout.py", "/budget.py", "/runtime/records.py"),
    *("/runtime/compatibility.py", "/runtime/symbolic_layout.py", "/runtime/size_expression.py", "/runtime/inputs.py"),
    *("/runtime/outputs.py", "/runtime/call_structure.py", "/runtime/linear_choice.py", "/runtime/budget_choice.py"),
    *("/runtime/policy.py", "/runtime/calibration.py", "/runtime/options.py", "/renamed.py", "/placement_names.py"),
)


def is_pure(place: Place) -> bool:
    """What is interrupted there is so by the lines around it: these change nothing."""
    return any(part in place[0] for part in _PURE)


def places(operation: Callable[[], object], *, opcodes: bool = False) -> list[tuple[Place, int]]:
    """Where an operation can be interrupted: each line the first time it is executed, and the last."""
    counter = LineCounter(opcodes=opcodes)
    with traced(counter):
        operation()
    found = [(place, time) for place, times in counter.seen.items() for time in sorted({1, times})]
    assert found
    return found


def interrupted_at(operation: Callable[[], object], place: Place, at: int, *, opcodes: bool = False) -> bool:
    """Whether the interrupt came out of it. It must, if the place was reached; but Python reports what is raised in a
    finalizer, and drops it."""
    counter = LineCounter(place, at, opcodes=opcodes)
    dropped: list[type[BaseException] | None] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda report: dropped.append(report.exc_type)
    try:
        with traced(counter):
            operation()
    except KeyboardInterrupt:
        assert counter.sent and not dropped
        return True
    finally:
        sys.unraisablehook = before
    assert dropped in ([], [KeyboardInterrupt])
    assert counter.sent == bool(dropped), f"an interrupt at {place} was lost"
    return counter.sent


LATEST_S = 0.1


class Interrupter:
    """A thread that sends SIGINT to this process, once for each time it is asked, after a while."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._wanted = threading.Semaphore(0)
        self._delay_s = 0.0
        self._ends = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Interrupter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends = True
        self._wanted.release()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._wanted.acquire()
            if self._ends:
                return
            time.sleep(self._delay_s)
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(self, operation: Callable[[], object], within_s: float) -> None:
        """Does it again and again until the signal comes, at a moment that nobody chose.

        Soon, however long the operation took when it was timed: each load leaves a mapped file of torch's behind, and
        thousands more of them would fill the disk. What Python drops, because it came in a finalizer, has come, too.
        """
        self._delay_s = self._random.uniform(0, min(within_s, LATEST_S))
        dropped: list[type[BaseException] | None] = []
        before = sys.unraisablehook
        sys.unraisablehook = lambda report: dropped.append(report.exc_type)
        try:
            self._wanted.release()
            while not dropped:
                operation()
        except KeyboardInterrupt:
            pass
        finally:
            sys.unraisablehook = before
        assert dropped in ([], [KeyboardInterrupt])
