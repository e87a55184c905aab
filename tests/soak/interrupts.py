"""Real interrupts: at a moment that a timer of the kernel picks, or at a line that a trace function counts down to."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Protocol

import penstock

SOURCES = str(Path(penstock.__file__).parent)
# Until the handler has run for a signal that was sent; nothing is asserted about time, but a lost one must not hang.
PATIENCE_S = 60.0


class Lost(Exception):
    """A signal was sent, and no KeyboardInterrupt came of it."""


class Handler:
    """What Ctrl-C does in Python, and how often it did."""

    def __init__(self) -> None:
        self.delivered = 0

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.delivered += 1
        raise KeyboardInterrupt


@dataclass
class Outcome:
    """What came of an operation; `finished` if it returned."""

    finished: bool = False
    value: Any = None
    error: Exception | None = None
    interrupted: bool = False


class Sender(Protocol):
    def arm(self, operation: str, draw: Random) -> None: ...

    def disarm(self) -> bool:
        """Whether a signal was sent since arm()."""
        ...


class Interrupter:
    """Runs operations with one interrupt somewhere in each."""

    def __init__(self, handler: Handler, sender: Sender) -> None:
        self._handler = handler
        self._sender = sender

    def run(self, operation: str, body: Callable[[], Any], draw: Random) -> Outcome:
        outcome = Outcome()
        before, sent = self._handler.delivered, None
        # Python drops an interrupt that comes in a finalizer, and modules of earlier actions may wait for theirs.
        gc.disable()
        try:
            try:
                self._sender.arm(operation, draw)
                outcome.value = body()
                outcome.finished = True
            except Exception as error:
                outcome.error = error
            sent = self._sender.disarm()
            deadline = time.monotonic() + PATIENCE_S
            while sent and self._handler.delivered == before and time.monotonic() < deadline:
                time.sleep(0)
        except KeyboardInterrupt:
            outcome.interrupted = True
        gc.enable()
        if sent is None:
            sent = self._sender.disarm()
        if sent and not outcome.interrupted:
            came = (
                "its KeyboardInterrupt was swallowed" if self._handler.delivered > before else "no handler was called"
            )
            raise Lost(f"an interrupt was sent during {operation}, and {came} ({outcome})")
        return outcome


# ---- at a moment


class _TimeSpec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]


class _Event(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    ]


class Timer:
    """The kernel sends the signal, so Python's own lock has no say in when. The moment is a part of what the operation
    usually takes, and sometimes more."""

    _MONOTONIC, _SIGNAL = 1, 0
    _FIRST_GUESS_NS = 1_000_000

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _Event(None, signal.SIGINT, self._SIGNAL)
        if self._library.timer_create(self._MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")
        self._usual_ns: dict[str, float] = {}
        self._operation, self._begin_ns, self._armed = "", 0, False

    def arm(self, operation: str, draw: Random) -> None:
        self._operation = operation
        delay_ns = int(draw.uniform(0, 1.1) * self._usual_ns.get(operation, self._FIRST_GUESS_NS))
        self._begin_ns = time.monotonic_ns()
        self._armed = True
        self._set(max(delay_ns, 1))

    def disarm(self) -> bool:
        if not self._armed:
            return False
        self._armed = False
        # A signal that is on its way is dropped by newer kernels when its timer is set again. So a timer that has
        # expired is left alone; and of one that expires between the two calls nobody can say whether it came.
        left = self._get()
        sent = not (left.value.s or left.value.ns)
        if not sent:
            self._set(0)
        if not sent:
            # What was interrupted says nothing about how long it takes.
            took_ns = time.monotonic_ns() - self._begin_ns
            usual_ns = self._usual_ns.get(self._operation, took_ns)
            self._usual_ns[self._operation] = 0.8 * usual_ns + 0.2 * took_ns
        return sent

    def _get(self) -> _TimerSpec:
        left = _TimerSpec()
        if self._library.timer_gettime(self._timer, ctypes.byref(left)):
            raise OSError(ctypes.get_errno(), "timer_gettime")
        return left

    def _set(self, delay_ns: int) -> None:
        wanted = _TimerSpec()
        wanted.value.s, wanted.value.ns = divmod(delay_ns, 1_000_000_000)
        if self._library.timer_settime(self._timer, 0, ctypes.byref(wanted), None):
            raise OSError(ctypes.get_errno(), "timer_settime")


# ---- at a line


class Line:
    """The same lines for the same seed, on any machine: the n-th that is executed in Penstock's sources."""

    def __init__(self) -> None:
        self._left = 0
        self._sent = False
        self._usual: dict[str, int] = {}
        self._operation, self._counted = "", 0

    def arm(self, operation: str, draw: Random) -> None:
        self._operation, self._counted = operation, 0
        self._left = int(draw.uniform(0, 1.1) * self._usual.get(operation, 200)) + 1
        self._sent = False
        sys.settrace(self._enter)

    def disarm(self) -> bool:
        sys.settrace(None)
        if not self._sent:
            self._usual[self._operation] = self._counted
        sent, self._sent = self._sent, False
        return sent

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self._sent:
            self._counted += 1
            if self._counted == self._left:
                self._sent = True
                signal.raise_signal(signal.SIGINT)
        return self._line
