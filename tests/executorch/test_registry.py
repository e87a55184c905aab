"""The delegate's sessions: who shares one, and who waits for its load. Over a core that a test holds up."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.executorch.build import headers_folder, sources_folder
from tests.runtime.builds import COMPILER, WORKERS
from tests.runtime.mutants import Mutated

# Conditions and calls of the registry that may be wrong; loading itself is for tests/executorch/test_module.py.
SKIPPED = {"poison_asked", "extents_of", "ProgramSession", "~ProgramSession"}
EQUIVALENT = {
    "program_session.cpp ~SessionRef: if (key_) taken for true": "a session that was lent has no key to look up",
    "program_session.cpp ~SessionRef: if (key_) taken for false": "it needs a third one who joins between two others",
    "program_session.cpp ~SessionRef: all.changed.wait(hold, [&] { return !all.busy.count(*key_); }) left out": (
        "it needs a third one who joins between two others"
    ),
    "program_session.cpp ~SessionRef: session_.reset() left out (2)": "the member goes a moment later, unlocked",
}


def built(folder: Path, replaced: dict[str, str] | None = None) -> Path:
    for name, text in (replaced or {}).items():
        (folder / name).write_text(text)
    sources = [folder / "program_session.cpp", folder / "mutants.cpp"] if replaced else []
    names = ["budget.cpp", "load_error.cpp", "session_budget.cpp", *([] if replaced else ["program_session.cpp"])]
    sources += [sources_folder() / name for name in names]
    program = folder / "registry_probe"
    folders = (folder, sources_folder(), headers_folder())
    includes = [*(f"-I{each}" for each in folders), *(["-DWITH_MUTANTS"] if replaced else [])]
    probe = Path(__file__).with_name("registry_probe.cpp")
    # To look into an optional without a value ends the program, whatever lies there.
    includes.append("-D_GLIBCXX_ASSERTIONS")
    command = [COMPILER, "-std=c++20", "-pthread", *includes, str(probe), *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def test_loads_wait_for_those_they_share_with_and_for_nobody_else(tmp_path: Path) -> None:
    done = subprocess.run([str(built(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_fault_is_missed(tmp_path: Path) -> None:
    made = Mutated(sources_folder(), ["program_session.cpp"], SKIPPED)
    program = built(tmp_path, made.texts)

    def survives(number: int) -> bool:
        environment = {**os.environ, "PENSTOCK_MUTANT": str(number)}
        return subprocess.run([str(program)], env=environment, capture_output=True).returncode == 0

    assert survives(0)
    with ThreadPoolExecutor(WORKERS) as workers:
        found = list(workers.map(survives, [one.number for one in made.mutants]))
    assert len(made.mutants) > 15
    alive = [one.name for one, survived in zip(made.mutants, found, strict=True) if survived]
    survivors = [name for name in alive if name not in EQUIVALENT]
    assert not survivors, f"done to the delegate, and nothing went wrong: {survivors}"
