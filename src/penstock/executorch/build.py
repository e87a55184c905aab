"""Builds the delegate library against the installed executorch and torch, once for each pair of them.

`python -m penstock.executorch.build` builds it ahead of its first use, and prints where it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.errors import PenstockError, ToolchainError
from penstock.executorch.library import ENVIRONMENT, LIBRARY, executorch_folder
from penstock.native import library_path as core_path
from penstock.store.cache_folder import cache_folder, make_private
from penstock.store.entry_lock import entry_lock
from penstock.temporary import TemporaryFolder
from penstock.weights.partial import partial_file

LOGGER = logging.getLogger("penstock")
# Folder inside the cache folder. It has one library for each pair of versions that it was built against.
_FOLDER = "delegates"

# As in the wheel's own CMake config. Without the first, its headers look for one that only a build of torch has.
_DEFINITIONS = ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED", "-DET_USE_THREADPOOL"]
_FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-pthread"]
# The sources that include torch's headers; the others may include ExecuTorch's, which define the same names.
_GRAPHS_SOURCE = "graph_memory.cpp"
_TORCH_SOURCES = ("code.cpp", _GRAPHS_SOURCE, "state_table.cpp")


def sources_folder() -> Path:
    """The sources ship inside the package: an installation builds them against the executorch and torch beside it."""
    folder = Path(__file__).resolve().parent / "csrc"
    if not folder.is_dir():
        raise PenstockError(f"the delegate's sources are missing: {folder} does not exist")
    return folder


def headers_folder() -> Path:
    return Path(__file__).resolve().parents[1] / "include"


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PenstockError("torch is not installed")
    return Path(spec.origin).parent


def cuda_headers(torch: Path) -> Path | None:
    """CUDA's headers, which torch's own headers for graph_memory.cpp include: from beside this torch or from a toolkit.
    None if torch has no CUDA or they are not found: the library then has no CUDA graphs, and says so when asked."""
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        return None
    beside = torch.parent
    folders = [*sorted(beside.glob("nvidia/*/include")), beside / "triton/backends/nvidia/include"]
    folders += [Path(home) / "include" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    needed = ("cuda_runtime_api.h", "crt/host_defines.h")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


def build(target: Path | None = None) -> Path:
    """Returns the library's path: `target`, built anew, or one in the cache folder, where an existing build is reused.

    A new file each time: overwriting one that a process has mapped would crash that process.
    """
    if target is not None:
        _build(target)
        return target
    make_private(cache_folder())
    kept = cache_folder() / _FOLDER / _key() / LIBRARY
    if kept.exists():
        return kept
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with entry_lock(kept.parent / "lock", "builds the ExecuTorch delegate", LOGGER.warning):
        if not kept.exists():
            versions = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("executorch", "torch"))
            # A warning, because a minute of silence looks like a fault.
            LOGGER.warning("building the ExecuTorch delegate for %s, once: it takes up to a minute", versions)
            _build(kept)
    return kept


def _key() -> str:
    """Hash of everything that goes into the build: neither executorch nor torch has a stable C++ interface."""
    made = hashlib.sha256()
    for name in ("executorch", "torch"):
        made.update(f"{name} {importlib.metadata.version(name)} ".encode())
    made.update(f"{executorch_folder()} {_torch_folder()} {core_path()} {_FLAGS} {_DEFINITIONS} ".encode())
    made.update(f"{cuda_headers(_torch_folder())} ".encode())
    for source in (*sorted(sources_folder().iterdir()), *sorted(headers_folder().iterdir())):
        made.update(f"{source.name} {source.stat().st_size} ".encode() + source.read_bytes())
    return made.hexdigest()[:16]


def _build(target: Path) -> None:
    executorch, torch = executorch_folder(), _torch_folder()
    if not (executorch / "lib" / "libexecutorch.so").exists():
        raise PenstockError(f"{executorch} has no lib/libexecutorch.so; executorch 1.5 or later has one")
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ToolchainError(
            f"the ExecuTorch delegate must be built, and there is no C++ compiler {compiler!r}: install g++, or name "
            f"one with $CXX, or a library that was built elsewhere with ${ENVIRONMENT}"
        )
    # For the core's C interface, which both kinds of sources include.
    own = f"-I{headers_folder()}"
    torch_includes = [
        own,
        "-isystem",
        str(torch / "include"),
        "-isystem",
        str(torch / "include/torch/csrc/api/include"),
    ]
    portable = executorch / "include/executorch/runtime/core/portable_type/c10"
    other_includes = [
        own,
        *_DEFINITIONS,
        f'-DPENSTOCK_CORE_PATH="{core_path()}"',
        "-isystem",
        str(executorch / "include"),
        "-isystem",
        str(portable),
    ]
    folders = [executorch / "lib", torch / "lib"]
    cuda = cuda_headers(torch)
    with TemporaryFolder("delegate") as scratch:
        commands = []
        for source in sorted(sources_folder().glob("*.cpp")):
            includes = torch_includes if source.name in _TORCH_SOURCES else other_includes
            if source.name == _GRAPHS_SOURCE and cuda is not None:
                includes = [*includes, "-DPENSTOCK_TORCH_CUDA", "-isystem", str(cuda)]
            commands.append([compiler, *_FLAGS, *includes, "-c", str(source), "-o", str(scratch / f"{source.stem}.o")])
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(_run, commands))
        linked = scratch / target.name
        _run(
            [
                *(compiler, "-shared", "-pthread", *(command[-1] for command in commands), "-o", str(linked)),
                *(f"-L{folder}" for folder in folders),
                *(f"-Wl,-rpath,{folder}" for folder in folders),
                # torch, not torch_cpu alone: with CUDA, torch brings in the CUDA part of the loader.
                *("-Wl,--no-as-needed", "-lexecutorch", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
                *(("-ltorch_cuda", "-lc10_cuda") if cuda is not None else ()),
            ]
        )
        content = linked.read_bytes()
        with partial_file(target, len(content)) as file:
            file.write(0, content)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{' '.join(command)} failed:\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    print(build())
