from __future__ import annotations

import fcntl
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.config as inductor_config

from penstock.cli.main import main
from penstock.program import METADATA_FILE, Program, program_to_json
from tests.harness import FAST


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """Fails unless stdout is one JSON document and nothing else."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in this process, where torch is imported already; what children print is captured, too."""

    def call(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capfd.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests.cli.models:small, exported by the command itself; once, whichever worker comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cli-program"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "model.pt2").exists():
            # As in tests.harness: the wrapper's own speed does not matter, which saves a third of the time. The trial
            # of the compiler, another third, is for tests/export and for the doctor.
            with inductor_config.patch(FAST), pytest.MonkeyPatch.context() as patch:
                patch.setattr("penstock.export.compile.check_toolchain", lambda: None)
                arguments = ["export", "tests.cli.models:small", "-o", str(folder / "model.pt2"), "--device", "cpu"]
                assert main(arguments) == 0
    return folder / "model.pt2"


def write_metadata(path: Path, program: Program, others: Sequence[tuple[str, bytes]] = ()) -> Path:
    """A .pt2 with metadata made by hand, and no code."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"archive/extra/{METADATA_FILE}", program_to_json(program))
        for name, content in others:
            archive.writestr(name, content)
    return path


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """The archive with what `change` makes of each of its files."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target
