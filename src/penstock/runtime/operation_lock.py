"""One operation of a module at a time, and none that an interrupt cuts in two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from penstock.runtime.interrupts import HeldInterrupts, deliver_interrupt

# An operation that waits for another thread has not begun, and checks for interrupts this often.
_LOOK_S = 0.05


class OperationLock:
    """Not reentrant: an operation calls no other operation of the same module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def operation(self, require: Callable[[], None], *, wait: bool = True) -> Operation:
        """`require` raises if there is nothing to operate on; it is called before and after the wait for others."""
        return Operation(self._lock, require, wait)


class Busy(Exception):
    """Another thread's operation is under way."""


class Operation:
    """Raises Busy instead of waiting if `wait` is false."""

    __slots__ = ("_hold", "_lock", "_require", "_wait")

    def __init__(self, lock: threading.Lock, require: Callable[[], None], wait: bool) -> None:
        self._lock = lock
        self._require = require
        self._wait = wait
        self._hold = HeldInterrupts()

    def __enter__(self) -> None:
        hold = self._hold.__enter__()
        owned = False
        try:
            self._require()
            owned = self._lock.acquire(blocking=False)
            while not owned:
                if not self._wait:
                    raise Busy
                owned = self._lock.acquire(timeout=_LOOK_S)
                deliver_interrupt()
            self._require()
        except BaseException as error:
            if owned:
                self._lock.release()
            hold.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        self._hold.__exit__(kind, value, trace)
