"""The C++ example: built with CMake against the installed executorch, run without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import penstock
from penstock.executorch.library import executorch_folder
from tests.executorch.programs import REPOSITORY, WIDTH, random_rows
from tests.runtime.modules import EVERYTHING

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def example(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    return built(tmp_path_factory.mktemp("example"), REPOSITORY / "examples" / "executorch", library)


def built(build: Path, sources: Path, library: Path) -> Path:
    """The program, compiled as its CMakeLists.txt says."""
    configure = [
        *("cmake", "-S", sources, "-B", build),
        f"-Dexecutorch_DIR={executorch_folder() / 'share' / 'cmake'}",
        f"-DPENSTOCK_EXECUTORCH_LIBRARY={library}",
        f"-DTORCH_FOLDER={Path(torch.__file__).parent}",
        f"-DCMAKE_CXX_COMPILER={os.environ.get('CXX', 'g++')}",
    ]
    for command in (configure, ["cmake", "--build", build]):
        subprocess.run(command, check=True, capture_output=True)
    return build / "run_model"


@pytest.fixture(scope="module")
def run_model(example: Path) -> Run:
    return lambda program, budget, x: run(example, program, budget, x)


def run(binary: Path, program: Path, budget: object, x: torch.Tensor) -> subprocess.CompletedProcess[bytes]:
    words = [binary, program, program.with_suffix(".ptd"), str(budget), *map(str, x.shape)]
    return subprocess.run(words, input=x.numpy().tobytes(), capture_output=True, check=False)


def test_it_runs_inside_the_budget_that_it_sets(run_model: Run, lowered: Callable[[str], Path]) -> None:
    x = random_rows(5)
    with penstock.Module(lowered("chain"), EVERYTHING) as module:
        expected = module(x)["hidden"]
        floor_bytes, full_bytes = module.floor_bytes, module.budget_bytes
    origins = {"default": b"(automatic)", floor_bytes: b"(given at load)", full_bytes: b"(given at load)"}
    for budget, said in origins.items():
        done = run_model(lowered("chain"), budget, x)
        assert done.returncode == 0, done.stderr
        found = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(5, WIDTH // 2)
        assert torch.equal(found, expected)
        assert said in done.stderr


def test_another_blas_in_front_of_torchs_is_refused(
    library: Path, lowered: Callable[[str], Path], tmp_path: Path
) -> None:
    """As it would be linked by someone who leaves torch's library to the delegate: the bits were others then."""
    example = REPOSITORY / "examples" / "executorch"
    shutil.copy(example / "main.cpp", tmp_path)
    text = (example / "CMakeLists.txt").read_text()
    assert text.count("PRIVATE ${TORCH_CPU} ") == 1
    (tmp_path / "CMakeLists.txt").write_text(text.replace("PRIVATE ${TORCH_CPU} ", "PRIVATE "))
    done = run(built(tmp_path / "build", tmp_path, library), lowered("chain"), "default", random_rows(5))
    assert done.returncode == 1
    assert b"libexecutorch_kernels_optimized.so takes the place of torch's BLAS" in done.stderr
    assert b"link libtorch_cpu.so before it" in done.stderr


def test_what_it_refuses(run_model: Run, lowered: Callable[[str], Path]) -> None:
    with penstock.Module(lowered("chain"), EVERYTHING) as module:
        floor_bytes = module.floor_bytes
    refusals = {
        floor_bytes - 1: f"it needs at least {floor_bytes} bytes".encode(),
        "-1": b"is no number of bytes",
        "12abc": b"is no number of bytes",
        "9" * 300: b"255 characters or more",
    }
    for budget, said in refusals.items():
        done = run_model(lowered("chain"), budget, random_rows(5))
        assert done.returncode == 1
        assert said in done.stderr
        assert b"error 0x12" in done.stderr
