"""The delegate's sessions: who shares one, and who waits for its load. Over a core that a test holds up."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.executorch.build import headers_folder, sources_folder
from tests.runtime.builds import COMPILER, WORKERS
from tests.runtime.mutants import THOROUGH, Mutated

FILES = ["sharing.h", "program_session.cpp", "session_budget.cpp"]
# Of a session, what the plays of tests/executorch/delegate_plays.py say: what is told of it, traces and figures.
TOLD = {"facts", "lines_about", "take_news", "stop_trace", "start_trace", "link", "counters", "only_session"}
SKIPPED = {*TOLD, "poison_asked", "ProgramSession"}
NEEDS_THREAD = "it needs another thread in the same moment"
HOLD = "std::lock_guard<std::mutex> hold"
EQUIVALENT = {
    f"{place}: {HOLD}({lock}); left out{number}": NEEDS_THREAD
    for place, lock, count in (
        ("sharing.h Sharing", "lock_", 5),
        ("sharing.h Sharing", "all.lock_", 1),
        ("session_budget.cpp set_budget", "facts_lock_", 2),
    )
    for number in ("", *(f" ({n})" for n in range(2, count + 1)))
}
EQUIVALENT |= {
    "session_budget.cpp installs: if (!slots.count) taken for true": "packed weights: tests/executorch/test_packed.py",
}


def built(folder: Path, replaced: dict[str, str] | None = None) -> Path:
    # A copy: a header is first looked for beside the file that includes it.
    copied = shutil.copytree(sources_folder(), folder / "csrc")
    for name, text in (replaced or {}).items():
        (copied / name).write_text(text)
    names = ["budget.cpp", "load_error.cpp", "session_budget.cpp", "program_session.cpp"]
    sources = [copied / name for name in (*names, *(["mutants.cpp"] if replaced else []))]
    program = folder / "registry_probe"
    folders = (copied, headers_folder())
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
    made = Mutated(sources_folder(), FILES, SKIPPED, THOROUGH)
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
