"""Ctrl-C waits until an operation has ended.

Python raises KeyboardInterrupt between any two instructions of the main thread, even between a native call and the line
that stores its result. No arrangement of try and finally covers every such place. So while an operation works, the
SIGINT handler only takes a note, and the previous handler is called when the operation has ended. Whatever that handler
does (it usually raises KeyboardInterrupt), it finds an operation that is complete or has not begun.

Other threads are never interrupted, so nothing is held there. If the handler was not set from Python, or there is none,
it raises nothing and stays in place.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

# The hold in force on the main thread; holds nested in it do nothing themselves.
_in_force: HeldInterrupts | None = None


class HeldInterrupts:
    """A context manager that makes SIGINT wait. Nested in another one it does nothing."""

    __slots__ = ("_handler", "_note", "_noted")

    def __init__(self) -> None:
        self._handler: _Handler | None = None
        self._noted = False

    def __enter__(self) -> HeldInterrupts:
        global _in_force
        if _in_force is not None or not _in_main_thread():
            return self
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return self
        self._handler = handler

        def note(number: int, frame: FrameType | None) -> None:
            self._noted = True

        self._note = note
        # signal() first handles signals that have arrived, then installs the note. So an interrupt can be raised up to
        # here, when nothing has been done, but not below.
        signal.signal(signal.SIGINT, note)
        _in_force = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler = self._handler
        if handler is None:
            return
        self.release()
        if self._noted:
            handler(signal.SIGINT, inspect.currentframe())

    def release(self) -> None:
        """From here on interrupts are raised again; a pending one is forgotten."""
        global _in_force
        handler, self._handler = self._handler, None
        _in_force = None
        # Somebody else may have set a handler meanwhile; it is not ours to take away.
        if handler is not None and signal.getsignal(signal.SIGINT) is self._note:
            signal.signal(signal.SIGINT, handler)

    def deliver(self) -> None:
        """Calls the handler now if an interrupt is pending; the handler may raise."""
        if self._noted and self._handler is not None:
            self._noted = False
            self._handler(signal.SIGINT, inspect.currentframe())


def deliver_interrupt() -> None:
    """For places where a long operation can be given up: raises a pending interrupt, if there is one."""
    if _in_force is not None and _in_main_thread():
        _in_force.deliver()


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _release_in_child() -> None:
    # The operation is the parent's, and ends there.
    if _in_force is not None:
        _in_force.release()


os.register_at_fork(after_in_child=_release_in_child)
