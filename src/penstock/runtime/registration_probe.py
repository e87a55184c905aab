"""Whether one page of a file can be registered with a device. The core finds out in a separate process
(csrc/open/registration_probe.h)."""

from __future__ import annotations

import os

from penstock.native import core
from penstock.runtime.failures import last_exception
from penstock.runtime.interrupts import HeldInterrupts
from penstock.runtime.progress import Attended


class RegistrationProbe:
    """Started here and asked later, so that it starts up beside other work. It runs once per process, device and file
    system: if the answer is known, there is no child."""

    def __init__(self, path: str | os.PathLike[str], device_index: int) -> None:
        self.handle: int | None = core().penstock_probe_begin(os.fsencode(path), device_index) or None
        if self.handle is None:
            raise last_exception()

    def require(self) -> None:
        """Waits for the answer. Raises RegistrationError when the file cannot be registered."""
        with HeldInterrupts(), Attended() as attended:
            failed = core().penstock_probe_require(self.handle, attended.on_bytes)
        if failed:
            raise last_exception()

    def close(self) -> None:
        """Kills a child that nobody asked."""
        with HeldInterrupts():
            handle, self.handle = self.handle, None
            if handle is not None:
                core().penstock_probe_destroy(handle)
