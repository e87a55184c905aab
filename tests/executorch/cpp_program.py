"""Programs in C++ that use ExecuTorch and the delegate, built for tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from penstock.executorch import build
from penstock.executorch.library import executorch_folder


def build_program(source: Path, library: Path, program: Path) -> Path:
    root, torch_libraries = executorch_folder(), Path(torch.__file__).parent / "lib"
    headers = Path(build.__file__).parent / "csrc"
    portable = root / "include/executorch/runtime/core/portable_type/c10"
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++17", "-pthread", "-DC10_USING_CUSTOM_GENERATED_MACROS"),
        *(
            f"-I{root / 'include'}",
            f"-I{portable}",
            f"-I{headers}",
            str(source),
            "-o",
            str(program),
        ),
        # torch first, as in examples/executorch/CMakeLists.txt: its BLAS is to be the one that its code calls.
        *("-Wl,--no-as-needed", f"-L{torch_libraries}", "-ltorch_cpu", str(library), f"-L{root / 'lib'}"),
        *("-lexecutorch", "-lexecutorch_kernels_optimized"),
        *(f"-Wl,-rpath,{folder},-rpath-link,{folder}" for folder in (torch_libraries, root / "lib")),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return program
