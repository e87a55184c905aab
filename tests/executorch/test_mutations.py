"""Mutation check of the delegate: small faults put into it one at a time (tests/runtime/mutants.py). Each must be
missed by a play (tests/executorch/delegate_plays.py).

What no play can miss stands in EQUIVALENT, with the reason. A condition, call or lock that is added without a play
turns this red. The registry of sessions has plays of its own, over a core that they hold up: test_registry.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.executorch import build as building
from penstock.executorch.library import LIBRARY
from penstock.native import library_path as core_path
from tests.executorch.test_gpu_checks import driver
from tests.executorch.test_registry import SKIPPED as NOT_OF_THE_REGISTRY
from tests.runtime.builds import WORKERS, play
from tests.runtime.mutants import Mutant, Mutated, Rules

__all__ = ["driver"]

SOURCES = building.sources_folder()
FILES = ["delegate.cpp", "error_code.cpp", "program_session.cpp", "code.cpp", "state_table.cpp", "transfer_memory.cpp"]
OF_A_GPU = {"current_device_index", "current_stream", "give_back_cached_memory"}
# The first: test_registry.py.
SKIPPED = {"take_session", *OF_A_GPU, "wait_for"}
CALLS = re.compile(
    r"(?<![\w.>:~])(?:check_build|check_program|check_delegate|check_input|log_line|compute|(?:bytes|processed)->Free"
    r"|delegate\.code->\w+|code\.forget|state->\w+|require_valid|reset|wait_for|fill|invalid_\.clear|taken\(\)\.\w+|"
    r"core\(\)\.(?:session_abort|session_destroy|driver_destroy)"
    r"|std::sort|ends\.push_back|spans\.emplace_back|close|unlink|parts_->\w+\.(?:clear|push_back))\("
)
RULES = Rules(CALLS, refusals=True, parts=True)
NEEDS_GPU = "it needs a torch that has a GPU"
NEEDS_THREAD = "it needs another thread in the same moment"
OTHER_BLAS = "it needs a process in C++ with another BLAS: tests/executorch/test_example.py"
NEEDS_SIGNAL = "it needs a signal inside of a write"
TICKET = (
    "delegate_ref.number < 0 || (size_t)delegate_ref.number >= payload.methods.size() || "
    "payload.methods[(size_t)delegate_ref.number].name != delegate_ref.method"
)
REPLAYED = "!replays || !replays->replay(shapes, stream)"
INTERRUPTED = "written < 0 && errno == EINTR"
EQUIVALENT: dict[str, str] = {
    f"delegate.cpp load: delegate_ref.number < 0 left out of {TICKET}": "as a size it is above every other",
    "delegate.cpp load: if (has_state) taken for true": "a method without state reads none of what it is lent",
    "delegate.cpp load: bytes->Free() left out": "the buffer does it itself when it goes, in the same moment",
    f"code.cpp PackageFile: if ({INTERRUPTED}) taken for false": NEEDS_SIGNAL,
    f"code.cpp PackageFile: written < 0 left out of {INTERRUPTED}": NEEDS_SIGNAL,
    "code.cpp PackageFile: written < 0 taken for true": "it needs a file system that writes nothing, and does not fail",
    'code.cpp CompiledCode: if (device == "cuda") taken for false': NEEDS_GPU,
    "code.cpp move_inputs: if (parts_->device.is_cpu()) taken for false": "one more copy of the same",
    "code.cpp move_inputs: if (parts_->device.is_cpu()) taken for true": NEEDS_GPU,
    **{
        f"delegate.cpp {fault}": "graphs are on a GPU only: tests/executorch/test_graphs.py"
        for fault in (
            "load: if (request.cuda_graph) taken for false",
            "load: if (delegate->graph_memory) taken for false",
            "execute_delegate: session.is_tracing() taken for true",
            "execute_delegate: session.is_tracing() taken for false",
            f"execute_delegate: if ({REPLAYED}) taken for true",
            f"execute_delegate: !replays->replay(shapes, stream) left out of {REPLAYED}",
            "execute_delegate: if (replays) taken for false",
        )
    },
    "transfer_memory.cpp ~TransferMemory: if (start_) taken for true": "the core is quiet about what was not allocated",
    "delegate.cpp PenstockBackend: log_line(kInfo, line) left out": "told by C++: tests/executorch/test_summary.py",
    'delegate.cpp check_program: if (payload.device == "cpu") taken for true': OTHER_BLAS,
    'delegate.cpp check_program: if (payload.device == "cpu") taken for false': OTHER_BLAS,
    'state_table.cpp device_of: device == "cuda" taken for false': NEEDS_GPU,
    "state_table.cpp guarded: device.is_cpu() taken for true": NEEDS_GPU,
    "state_table.cpp guarded: device.is_cpu() taken for false": NEEDS_GPU,
    **{
        f"state_table.cpp {function}: std::lock_guard<std::mutex> alone(running_); left out": NEEDS_THREAD
        for function in ("read", "write", "reset")
    },
    **{
        f"state_table.cpp {place}: wait_for(tensors_->device) left out{number}": NEEDS_GPU
        for place, number in (("read", ""), ("write", ""), ("write", " (2)"), ("reset", ""), ("reset", " (2)"))
    },
}
if torch.backends.cuda.is_built():
    EQUIVALENT["delegate.cpp device_index_of: request.device_index taken for true"] = "torch may name the same GPU"


def mutated() -> Mutated:
    made = Mutated(SOURCES, FILES, SKIPPED, RULES)
    # No machine is every machine: plays say what it is.
    told = 'std::getenv("PROBE_CPU") ? std::getenv("PROBE_CPU") : at::get_cpu_capability()'
    _replace(made, "code.cpp", "return at::get_cpu_capability()", f"return {told}")
    made.texts["code.cpp"] = '#include "tensor_count.h"\n' + made.texts["code.cpp"]
    return made


def _replace(made: Mutated, file: str, old: str, new: str) -> None:
    assert made.texts[file].count(old) == 1
    made.texts[file] = made.texts[file].replace(old, new)


def test_what_is_excused_is_there() -> None:
    """And every kind of fault is; and what is left out here is what has plays elsewhere."""
    names = {mutant.name for mutant in mutated().mutants}
    assert set(EQUIVALENT) <= names and len(names) > 150
    for kind in ("left out", "taken for true", "taken for false", "left out of", "lock_guard"):
        assert any(kind in name for name in names), kind
    assert not NOT_OF_THE_REGISTRY & SKIPPED


@pytest.fixture
def library_with_mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Mutant]]:
    folder = tmp_path / "csrc"
    shutil.copytree(SOURCES, folder)
    made = mutated()
    for name, text in made.texts.items():
        (folder / name).write_text(text)
    for name in ("delegate_probe.cpp", "tensor_count.h"):
        shutil.copy(Path(__file__).with_name(name), folder)
    monkeypatch.setattr(building, "sources_folder", lambda: folder)
    monkeypatch.setattr(building, "_FLAGS", ["-std=c++20", "-O0", "-fPIC", "-w", "-pthread"])
    return building.build(tmp_path / "with_mutants" / LIBRARY), made.mutants


def test_every_fault_is_missed(
    library_with_mutants: tuple[Path, list[Mutant]],
    lowered: Callable[[str], Path],
    library: Path,
    driver: dict[str, str],
    tmp_path: Path,
) -> None:
    path, mutants = library_with_mutants
    program = lowered("twin")

    def plays(part: list[Mutant], number: int) -> dict[int, str]:
        names = [f"{mutant.function}:{mutant.number}" for mutant in part]
        scratch = tmp_path / f"scratch-{number}"
        scratch.mkdir()
        environment = {
            "PENSTOCK_EXECUTORCH_LIBRARY": str(path),
            "TMPDIR": str(scratch),
            "OMP_NUM_THREADS": "1",
            **driver,
        }
        core = core_path()
        played = play(core, "tests.executorch.delegate_plays", str(program), *names, environment=environment)
        assert played.returncode == 0, played.stderr
        return {int(number): name for number, name in map(str.split, played.stdout.splitlines())}

    parts = [mutants[start::WORKERS] for start in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as workers:
        found = workers.map(plays, parts, range(WORKERS))
        missed = {number: name for part in found for number, name in part.items()}
    assert len(missed) == len(mutants)
    survivors = [one.name for one in mutants if missed[one.number] == "survived" and one.name not in EQUIVALENT]
    assert not survivors, f"done to the delegate, and nothing went wrong: {survivors}"
