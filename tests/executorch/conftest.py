from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("executorch.exir")

import penstock
from penstock.executorch.build import build
from penstock.executorch.library import LIBRARY
from penstock.native import library_path as core_path
from tests.executorch.programs import decoder, lower
from tests.harness import compiled


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Whichever worker comes first does it; the others wait and find it done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def library(shared: Path) -> Path:
    """The delegate library, built from the sources at hand; this process and its children use it."""
    path = shared / "delegate" / LIBRARY
    with _only_one(path.parent):
        if not path.exists():
            build(path)
    os.environ["PENSTOCK_EXECUTORCH_LIBRARY"] = str(path)
    # For a process without Python, which looks for the core beside the delegate.
    os.environ["PENSTOCK_CORE_LIBRARY"] = str(core_path())
    return path


@pytest.fixture(scope="session")
def lowered(shared: Path) -> Callable[[str], Path]:
    """The .pte of a program by its name, lowered when it is first asked for."""

    def path(name: str) -> Path:
        folder = shared / "lowered" / name
        with _only_one(folder):
            if not (folder / "model.pte").exists():
                lower(name, folder)
        return folder / "model.pte"

    return path


@pytest.fixture(scope="session")
def packaged(shared: Path) -> Path:
    """The .pt2 of the decoder, in the folder of tests/runtime, which compiles the same."""
    folder = shared / "compiled" / "decoder"
    with _only_one(folder):
        if not (folder / "model.pt2").exists():
            compiled(folder, decoder())
    return folder / "model.pt2"


@pytest.fixture
def opened() -> Iterator[Callable[..., penstock.executorch.Module]]:
    """Opens modules that are closed when the test ends."""
    import penstock.executorch

    modules: list[penstock.executorch.Module] = []

    def open_module(*arguments: object, **keywords: object) -> penstock.executorch.Module:
        modules.append(penstock.executorch.Module(*arguments, **keywords))  # type: ignore[arg-type]
        return modules[-1]

    yield open_module
    for module in modules:
        module.close()
