"""Builds the delegate library against the installed executorch and torch: `python -m penstock.executorch.build`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from penstock.errors import PenstockError, ToolchainError
from penstock.executorch.library import LIBRARY, cache_folder, executorch_folder, package_folder
from penstock.temporary import TemporaryFolder
from penstock.weights.partial import partial_file

# As the wheel's own CMake config sets them: without the first, its headers look for one that only a build of torch has.
_DEFINITIONS = ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED", "-DET_USE_THREADPOOL"]
_FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-pthread"]
# The only source that includes torch's headers; the others may include ExecuTorch's, which define the same names.
_TORCH_SOURCE = "code.cpp"


def sources_folder() -> Path:
    """Inside the package: an installation builds them against the executorch and torch beside it."""
    folder = Path(__file__).resolve().parent / "csrc"
    if not folder.is_dir():
        raise PenstockError(f"the delegate's sources are missing: {folder} does not exist")
    return folder


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PenstockError("torch is not installed")
    return Path(spec.origin).parent


def build(target: Path | None = None) -> Path:
    """The library's path. A new file each time: overwriting one that a process has mapped would crash that process."""
    executorch, torch = executorch_folder(), _torch_folder()
    if not (executorch / "lib" / "libexecutorch.so").exists():
        raise PenstockError(f"{executorch} has no lib/libexecutorch.so; executorch 1.5 or later has one")
    if target is None:
        folder = package_folder() if os.access(package_folder(), os.W_OK) else cache_folder()
        target = folder / LIBRARY
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    torch_includes = ["-isystem", str(torch / "include"), "-isystem", str(torch / "include/torch/csrc/api/include")]
    portable = executorch / "include/executorch/runtime/core/portable_type/c10"
    core_path = package_folder().parent / "libpenstock.so"
    other_includes = [
        *_DEFINITIONS,
        f'-DPENSTOCK_CORE_PATH="{core_path}"',
        "-isystem",
        str(executorch / "include"),
        "-isystem",
        str(portable),
    ]
    folders = [executorch / "lib", torch / "lib"]
    with TemporaryFolder("delegate") as scratch:
        running: list[tuple[list[str], subprocess.Popen[str]]] = []
        for source in sorted(sources_folder().glob("*.cpp")):
            includes = torch_includes if source.name == _TORCH_SOURCE else other_includes
            command = [compiler, *_FLAGS, *includes, "-c", str(source), "-o", str(scratch / f"{source.stem}.o")]
            running.append((command, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        told = [(command, process.communicate()[1], process.returncode) for command, process in running]
        for command, errors, status in told:
            if status:
                raise ToolchainError(f"{' '.join(command)} failed:\n{errors}")
            if errors:
                print(errors, file=sys.stderr)
        linked = scratch / target.name
        _run(
            [
                *(compiler, "-shared", "-pthread", *(command[-1] for command, _ in running), "-o", str(linked)),
                *(f"-L{folder}" for folder in folders),
                *(f"-Wl,-rpath,{folder}" for folder in folders),
                # torch, not torch_cpu alone: where there is CUDA, that is what brings its part of the loader.
                *("-Wl,--no-as-needed", "-lexecutorch", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
            ]
        )
        content = linked.read_bytes()
        with partial_file(target, len(content)) as file:
            file.write(0, content)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{' '.join(command)} failed:\n{done.stderr}")


if __name__ == "__main__":
    print(build())
