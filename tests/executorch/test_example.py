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
def run_model(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    build = tmp_path_factory.mktemp("example")
    configure = [
        *("cmake", "-S", REPOSITORY / "examples" / "executorch", "-B", build),
        f"-Dexecutorch_DIR={executorch_folder() / 'share' / 'cmake'}",
        f"-DPENSTOCK_EXECUTORCH_LIBRARY={library}",
        f"-DCMAKE_CXX_COMPILER={os.environ.get('CXX', 'g++')}",
    ]
    for command in (configure, ["cmake", "--build", build]):
        subprocess.run(command, check=True, capture_output=True)

    def run(program: Path, budget: object, x: torch.Tensor) -> subprocess.CompletedProcess[bytes]:
        words = [build / "run_model", program, program.with_suffix(".ptd"), str(budget), *map(str, x.shape)]
        return subprocess.run(words, input=x.numpy().tobytes(), capture_output=True, check=False)

    return run


def test_it_runs_inside_the_budget_that_it_sets(run_model: Run, lowered: Callable[[str], Path]) -> None:
    x = random_rows(5)
    with penstock.Module(lowered("chain"), EVERYTHING) as module:
        expected = module(x)["hidden"]
        floor_bytes, full_bytes = module.floor_bytes, module.budget_bytes
    origins = {"default": b"(automatic)", floor_bytes: b"(given at load)", full_bytes: b"(given at load)"}
    outputs = []
    for budget, said in origins.items():
        done = run_model(lowered("chain"), budget, x)
        assert done.returncode == 0, done.stderr
        outputs.append(torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(5, WIDTH // 2))
        assert said in done.stderr
    # The same bits at every budget. In another process the CPU's library may multiply in another order: there, the last
    # bits were seen to differ from this one's.
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-5, atol=1e-6)


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
