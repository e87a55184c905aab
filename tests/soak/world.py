"""What the sessions of one process share: references, drivers that outlive their modules, interrupts, counts, a log."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import penstock.runtime.module as module_file
from penstock.runtime.driver import Driver
from tests.runtime.modules import KeptDrivers
from tests.soak.interrupts import Handler, Interrupter, Sender
from tests.soak.programs import Kind, kinds
from tests.soak.reference import Reference
from tests.soak.tally import Tally
from tests.threads import thread_count


class World:
    def __init__(self, device: str, compiled: Path, scratch: Path, sender: Sender, log: Callable[[str], None]) -> None:
        self.device = device
        self.scratch = scratch
        self.tally = Tally()
        # Of each program as it may be loaded: its floor, and what all of it takes.
        self.floors: dict[str, tuple[int, int]] = {}
        self.log = log
        handler = Handler()
        handler.install()
        self.interrupter = Interrupter(handler, sender)
        self.kinds = tuple(kind for kind in kinds(device) if self._path(compiled, kind).exists())
        self.paths = {kind.name: self._path(compiled, kind) for kind in self.kinds}
        # Before drivers are kept: these live as long as the process.
        self.references = {kind.name: Reference(kind, self.paths[kind.name]) for kind in self.kinds}
        self.drivers = KeptDrivers()
        self._open_soft_driver = module_file.open_soft_driver

    @staticmethod
    def _path(compiled: Path, kind: Kind) -> Path:
        return compiled / kind.name / "model.pt2"

    def __enter__(self) -> World:
        module_file.open_soft_driver = self._opened
        return self

    def __exit__(self, *_: object) -> None:
        module_file.open_soft_driver = self._open_soft_driver

    def _opened(self, page_bytes: int, *, capacity_bytes: int = 0, poison: bool = False) -> Driver:
        return self.drivers.open(page_bytes, capacity_bytes=capacity_bytes, poison=poison)

    def begin_session(self) -> None:
        self.drivers = KeptDrivers()
        for reference in self.references.values():
            reference.forget()


def descriptors() -> dict[str, str]:
    """Of this process, by number: what they are open on."""
    found: dict[str, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except FileNotFoundError:
            continue  # the one that reads this list
    # torch's own, opened once when it first generates code.
    return {number: name for number, name in found.items() if name != f"/tmp/perf-{os.getpid()}.map"}


def threads() -> int:
    return thread_count()
