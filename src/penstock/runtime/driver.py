"""The driver of a device: the CUDA driver, or the soft driver where programs run on the CPU."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.native import core
from penstock.runtime.failures import last_exception
from penstock.runtime.interrupts import HeldInterrupts


@dataclass(frozen=True)
class Memory:
    free_bytes: int
    total_bytes: int


class Driver:
    """Owns a native driver; sessions use it and must be closed first."""

    def __init__(self, handle: int) -> None:
        self.handle: int | None = handle
        self._pid = os.getpid()

    @property
    def page_bytes(self) -> int:
        page = ctypes.c_int64()
        if core().penstock_driver_granularity(self.handle, ctypes.byref(page)):
            raise last_exception()
        return page.value

    @property
    def pool_unit_bytes(self) -> int:
        """Pools take memory in multiples of this."""
        unit = ctypes.c_int64()
        if core().penstock_driver_pool_unit(self.handle, ctypes.byref(unit)):
            raise last_exception()
        return unit.value

    def memory(self) -> Memory:
        free, total = ctypes.c_int64(), ctypes.c_int64()
        if core().penstock_driver_memory(self.handle, ctypes.byref(free), ctypes.byref(total)):
            raise last_exception()
        return Memory(free.value, total.value)

    def close(self) -> None:
        with HeldInterrupts():
            handle, self.handle = self.handle, None
            if handle is not None:
                core().penstock_driver_destroy(handle)

    def __del__(self) -> None:
        # Python drops an interrupt in a finalizer, and the rest of that finalizer. So each owner has its own.
        if self.handle is not None and os.getpid() == self._pid:
            self.close()


def open_soft_driver(page_bytes: int, *, capacity_bytes: int = 0, poison: bool = False) -> Driver:
    handle = core().penstock_soft_create(page_bytes, capacity_bytes, int(poison))
    if not handle:
        raise PenstockError(core().penstock_soft_error().decode())
    return Driver(handle)


def open_cuda_driver(device_index: int) -> Driver:
    handle = core().penstock_cuda_create(device_index)
    if not handle:
        raise last_exception()
    return Driver(handle)
