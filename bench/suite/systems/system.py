"""What the suite asks of a system."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bench.suite.model import ModelShape
from bench.suite.result import Traffic


class Unavailable(Exception):
    """Raised by a system's `open` where it turns out that it cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """One configuration to run. A budget is given as a part of the weights, in bytes, or not at all."""

    folder: Path
    device: str
    shape: ModelShape
    tokens: int
    weight_bytes: int
    # How long one round of back-to-back runs takes, about.
    round_s: float
    budget_fraction: float | None = None
    budget_bytes: int | None = None

    @property
    def weights_path(self) -> Path:
        return self.folder / "weights.safetensors"

    @property
    def program_path(self) -> Path:
        return program_path(self.folder, self.tokens)

    @property
    def packed_path(self) -> Path:
        return packed_path(self.program_path)


def packed_path(program: Path) -> Path:
    return program.with_suffix(".packed.ptd")


def program_path(folder: Path, tokens: int) -> Path:
    return folder / f"decoder-t{tokens}.pt2"


@dataclass(frozen=True)
class Facts:
    """What a system can tell of itself, asked after its runs."""

    traffic: Traffic
    budget_bytes: int | None = None
    floor_bytes: int | None = None
    weights_peak_bytes: int | None = None


@dataclass(frozen=True)
class Opened:
    forward: Callable[[Tensor], Tensor]
    facts: Callable[[], Facts]


@dataclass(frozen=True)
class System:
    name: str
    # As the table names it.
    title: str
    open: Callable[[Setting], AbstractContextManager[Opened]]
    # Called before each configuration and outside of what is measured: makes its own files where there are none.
    make: Callable[[Setting], None] | None = None
    ours: bool = False
    # Runs at every budget of the suite; others have a footprint of their own.
    budgeted: bool = False
    # Leaves nothing behind when closed, so that all its configurations may run in one process.
    shares_process: bool = False
    # A call returns before the device is done, so that the time it takes is the host's.
    asynchronous: bool = False
    # What must be importable.
    packages: tuple[str, ...] = ()
    # Why it cannot run without CUDA; empty when it can.
    needs_cuda: str = ""

    def missing(self, device: str) -> str:
        """Why it cannot run here; empty when it can, as far as can be told without importing anything."""
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if absent:
            return f"not importable: {', '.join(absent)}"
        if self.needs_cuda and not device.startswith("cuda"):
            return f"needs CUDA, and the device is {device}: {self.needs_cuda}"
        return ""
