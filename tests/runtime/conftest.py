from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

import penstock
import penstock.runtime.module as module_file
from tests.runtime.modules import COMPILERS, EVERYTHING, SCRIPTS, KeptDrivers, open_wrapped_driver, play


@pytest.fixture(scope="session")
def program_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The .pt2 of a program by its name, compiled when it is first asked for: once, whichever worker comes first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def path(name: str) -> Path:
        folder = shared / "compiled" / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "model.pt2").exists():
                COMPILERS[name](folder)
        return folder / "model.pt2"

    return path


@pytest.fixture(scope="session")
def decoder(program_path: Callable[[str], Path]) -> Path:
    """prefill of any length and decode, which share weights and caches."""
    return program_path("decoder")


@pytest.fixture(scope="session")
def chain(program_path: Callable[[str], Path]) -> Path:
    """One method without state, for any number of rows, with a baked budget."""
    return program_path("chain")


@pytest.fixture(scope="session")
def gate(program_path: Callable[[str], Path]) -> Path:
    """One method with branches and with state."""
    return program_path("gate")


@pytest.fixture(scope="session")
def resident_bits(program_path: Callable[[str], Path]) -> Callable[[str], list[list[Tensor]]]:
    """What a program's script gives when every weight stays on the device."""
    known: dict[str, list[list[Tensor]]] = {}

    def of(name: str) -> list[list[Tensor]]:
        if name not in known:
            with penstock.Module(program_path(name), EVERYTHING) as module:
                known[name] = play(module.run_method, SCRIPTS[name])
                assert module.stats().bytes_streamed == 0
        return known[name]

    return of


@pytest.fixture(autouse=True)
def _wrapped_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module's calls of its driver can be counted, and made to fail."""
    monkeypatch.setattr(module_file, "open_soft_driver", open_wrapped_driver)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptDrivers]:
    """Drivers that outlive their modules; at the end of the test nothing may be alive in any."""
    drivers = KeptDrivers()
    monkeypatch.setattr(module_file, "open_soft_driver", drivers.open)
    yield drivers
    try:
        drivers.check()
    finally:
        drivers.destroy()
