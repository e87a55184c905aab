"""A delegate's runs as CUDA graphs, as far as that goes without a GPU: what is captured, replayed and given up, over a
core and code that write down what is asked of them; and that the part for CUDA compiles."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.executorch.build import cuda_headers, headers_folder, sources_folder
from tests.runtime.builds import COMPILER, WORKERS
from tests.runtime.mutants import THOROUGH, Mutated

HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")


def built(folder: Path, replaced: dict[str, str] | None = None) -> Path:
    for name, text in (replaced or {}).items():
        (folder / name).write_text(text)
    sources = [folder / "replays.cpp", folder / "mutants.cpp"] if replaced else [sources_folder() / "replays.cpp"]
    sources += [Path(__file__).with_name("replay_probe.cpp"), sources_folder() / "load_error.cpp"]
    includes = [f"-I{each}" for each in (folder, sources_folder(), headers_folder())]
    flags = [
        "-std=c++20",
        "-Wall",
        "-Wextra",
        "-fsanitize=address,undefined",
        "-pthread",
        *(["-DWITH_MUTANTS"] if replaced else []),
    ]
    command = [COMPILER, *flags, *includes, *map(str, sources), "-o", str(folder / "replay_probe")]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find -lasan" in done.stderr or "cannot find -lubsan" in done.stderr:
        pytest.skip(f"{COMPILER} cannot build with sanitizers")
    assert done.returncode == 0, done.stderr
    return folder / "replay_probe"


def test_captures_and_replays(tmp_path: Path) -> None:
    done = subprocess.run([str(built(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_fault_is_missed(tmp_path: Path) -> None:
    made = Mutated(sources_folder(), ["replays.cpp"], rules=THOROUGH)
    program = built(tmp_path, made.texts)

    def survives(number: int) -> bool:
        environment = {**os.environ, "PENSTOCK_MUTANT": str(number)}
        return subprocess.run([str(program)], env=environment, capture_output=True).returncode == 0

    assert survives(0)
    with ThreadPoolExecutor(WORKERS) as workers:
        found = list(workers.map(survives, [one.number for one in made.mutants]))
        survivors = [one.name for one, survived in zip(made.mutants, found, strict=True) if survived]
    assert len(made.mutants) > 20 and not survivors


def toolkit() -> Path | None:
    """CUDA's headers, where this machine has some, whatever torch says."""
    beside = Path(torch.__file__).parents[1]
    folders = [beside / "triton/backends/nvidia/include", Path("/usr/local/cuda/include")]
    return next((one for one in folders if all((one / name).exists() for name in HEADERS)), None)


def test_the_part_for_cuda_compiles(tmp_path: Path) -> None:
    """Against torch's headers and CUDA's own; what torch's build would have written into one of them is made up."""
    folder = toolkit()
    if folder is None:
        pytest.skip("there are no headers of CUDA on this machine")
    (tmp_path / "c10/cuda/impl").mkdir(parents=True)
    (tmp_path / "c10/cuda/impl/cuda_cmake_macros.h").write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    torch_headers = Path(torch.__file__).parent / "include"
    system = [torch_headers, torch_headers / "torch/csrc/api/include", tmp_path, folder]
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DPENSTOCK_TORCH_CUDA"]
    command = [
        COMPILER,
        *flags,
        f"-I{headers_folder()}",
        *(word for each in system for word in ("-isystem", str(each))),
    ]
    done = subprocess.run([*command, str(sources_folder() / "graph_memory.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_where_headers_of_cuda_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has(folder: Path) -> Path:
        for name in HEADERS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        return folder

    home = has(tmp_path / "toolkit" / "include")
    monkeypatch.setenv("CUDA_HOME", str(home.parent))
    installed = tmp_path / "torch"
    (installed / "lib").mkdir(parents=True)
    assert cuda_headers(installed) is None
    (installed / "lib" / "libtorch_cuda.so").touch()
    assert cuda_headers(installed) == home
    # Those that came with this torch are of its version.
    triton = has(tmp_path / "triton/backends/nvidia/include")
    assert cuda_headers(installed) == triton
    (tmp_path / "nvidia/cuda_runtime/include").mkdir(parents=True)
    (tmp_path / "nvidia/cuda_runtime/include" / HEADERS[0]).touch()
    assert cuda_headers(installed) == triton
    assert cuda_headers(installed) != has(tmp_path / "nvidia/cu13/include")  # looked for anew below
    assert cuda_headers(installed) == tmp_path / "nvidia/cu13/include"
