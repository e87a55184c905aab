from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config

from tests.harness import FAST


@pytest.fixture(scope="session", autouse=True)
def quick_wrappers() -> Iterator[None]:
    """The examples compile as their users do; only here the wrapper's own speed does not matter."""
    with torch._inductor.config.patch(FAST):
        yield


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with prefill and decode. The folder is that of tests/runtime, so that it is compiled once for both."""
    from tests.runtime.modules import COMPILERS

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "compiled" / "decoder"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "model.pt2").exists():
            COMPILERS["decoder"](folder)
    return folder / "model.pt2"
