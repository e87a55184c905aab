"""The core's failures as exceptions: one class each."""

from __future__ import annotations

from penstock import errors
from penstock.native import core

# The numbers are those of `enum class Failure` in include/penstock_core.h.
_CLASSES: dict[int, type[errors.PenstockError]] = {
    1: errors.DriverCallError,
    2: errors.DeviceMemoryError,
    3: errors.RegistrationError,
    4: errors.ScheduleDivergedError,
    5: errors.WeightsChangedError,
    6: errors.StickyDeviceError,
    7: errors.CaptureError,
    8: errors.DriverCallError,
    9: errors.PenstockError,
    10: errors.RuntimeFailure,
    11: errors.BudgetError,
    13: errors.HostMemoryError,
    14: errors.BuildMismatchError,
}

# The caller that asked for a budget raises this one, with the numbers.
BELOW_FLOOR = 12

_STICKY = "; the device context is lost, and only a new process can use the device again"


def exception(failure: int, text: str) -> errors.PenstockError:
    kind = _CLASSES.get(failure)
    if kind is None:
        raise errors.PenstockError(f"the core reports failure {failure}, which is none of its own: {text}")
    return kind(text + _STICKY if kind is errors.StickyDeviceError else text)


def last_exception() -> errors.PenstockError:
    """What the core's last failed call on this thread said."""
    return exception(core().penstock_failure(), core().penstock_failure_text().decode())
