from __future__ import annotations

from pathlib import Path

import pytest

from tests.direct.emulation import build_machine


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulator without a kernel, compiled once."""
    return build_machine(tmp_path_factory.mktemp("machine"))
