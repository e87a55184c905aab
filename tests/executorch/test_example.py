"""The C++ example: built with CMake against the installed executorch, run without Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import BelowFloorError
from penstock.executorch.build import sources_folder
from penstock.executorch.library import executorch_folder
from penstock.executorch.lowered_file import read_lowered
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
        f"-DPENSTOCK_EXECUTORCH_HEADERS={sources_folder()}",
        f"-DTORCH_FOLDER={Path(torch.__file__).parent}",
        f"-DCMAKE_CXX_COMPILER={os.environ.get('CXX', 'g++')}",
    ]
    for command in (configure, ["cmake", "--build", build]):
        subprocess.run(command, check=True, capture_output=True)
    return build / "run_model"


@pytest.fixture(scope="module")
def run_model(example: Path) -> Run:
    return lambda program, budget, x, *later: run(example, program, budget, x, *later)


def run(
    binary: Path, program: Path, budget: object, x: torch.Tensor, *later: object
) -> subprocess.CompletedProcess[bytes]:
    """`later`: budgets that are set one after the other, each for one more run."""
    words = [binary, program, program.with_suffix(".ptd"), str(budget), *map(str, x.shape)]
    words += [word for given in later for word in ("--set-budget", str(given))]
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


def figures(printed: bytes, name: str) -> list[int]:
    """One for each run."""
    return [int(found) for found in re.findall(rf"^weight_offload_{name}=(\d+)$", printed.decode(), re.MULTILINE)]


def test_it_changes_the_budget_of_a_loaded_program(run_model: Run, lowered: Callable[[str], Path]) -> None:
    """The same bits at every budget, and the figures that Python has of the same plans."""
    x = random_rows(5)
    with penstock.Module(lowered("chain"), EVERYTHING) as module:
        # Of the plans in the file, those that were made for just what they hold: Python plans the same.
        sizes = [nbytes for nbytes in read_lowered(lowered("chain")).plan_bytes if nbytes >= module.floor_bytes]
        plans = [(nbytes, module.plan_at(nbytes)) for nbytes in sizes]
        same = [nbytes for nbytes, plan in plans if plan is not None and plan.device_bytes == nbytes]
        budgets = [same[0], same[-1], same[0]]
        expected, lasts, held = [], [], []
        for budget in budgets:
            module.set_budget(budget)
            expected.append(module(x)["hidden"])
            lasts.append(module.last_run)
            held.append(module.device_memory()[0])
    done = run_model(lowered("chain"), budgets[0], x, *budgets[1:])
    assert done.returncode == 0, done.stderr
    found = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(3, 5, WIDTH // 2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert figures(done.stderr, "budget") == budgets
    experts = ("expert_hits", "expert_misses", "expert_bytes")
    for name in ("bytes_streamed", "bytes_hit", "bytes_in_place", "bytes_decoded", "copies", *experts):
        assert figures(done.stderr, f"last_run_{name}") == [getattr(last, name) for last in lasts]
    assert lasts[0].bytes_streamed > 0 == lasts[1].bytes_streamed
    assert len(figures(done.stderr, "last_run_stall_ns")) == 3
    assert figures(done.stderr, "device_bytes") == held
    peaks = figures(done.stderr, "peak_device_bytes")
    assert peaks == sorted(peaks) and peaks[0] <= budgets[0] and peaks[-1] <= max(budgets)
    assert figures(done.stderr, "runs") == [1, 2, 3]
    rates = figures(done.stderr, "link_bytes_per_s")
    assert [rate > 0 for rate in rates] == [True, False, True]
    # What a run took, and beside it what of the link that is: where nothing streamed, nothing of it.
    times = [int(found) for found in re.findall(r"^run_ns=(\d+)$", done.stderr.decode(), re.MULTILINE)]
    lines = re.findall(
        r"^([\d.]+) ms a run(?:, ([\d.]+) GB/s over a link of ([\d.]+) GB/s: \d+%)?$", done.stderr.decode(), re.M
    )
    for (milliseconds, moved, link), run_ns, rate, last in zip(lines, times, rates, lasts, strict=True):
        assert float(milliseconds) == pytest.approx(run_ns / 1e6, abs=0.001)
        if last.bytes_streamed:
            assert float(moved) == pytest.approx(last.bytes_streamed / run_ns, abs=0.001)
            assert float(link) == pytest.approx(rate / 1e9, abs=0.001)
        else:
            assert not moved and not link


def test_it_runs_as_often_as_it_is_asked_to(example: Path, lowered: Callable[[str], Path]) -> None:
    x = random_rows(5)
    program = lowered("chain")
    once = run(example, program, 1 << 40, x)
    words = [example, program, program.with_suffix(".ptd"), str(1 << 40), "5", str(WIDTH), "--runs", "7"]
    often = subprocess.run(words, input=x.numpy().tobytes(), capture_output=True, check=True)
    assert often.stdout == once.stdout and figures(often.stderr, "runs") == [7]
    for wrong in (["--runs", "0"], ["--run", "7"], ["--runs"]):
        refused = subprocess.run([*words[:6], *wrong], input=b"", capture_output=True, check=False)
        assert refused.returncode == 2 and b"[--runs N]" in refused.stderr


def test_it_measures_what_python_calibrates_by(example: Path, lowered: Callable[[str], Path]) -> None:
    """The time of every step, and the rate of copies of each size."""
    x, program = random_rows(5), lowered("chain")
    with penstock.Module(program, EVERYTHING) as module:
        floor_bytes = module.floor_bytes
        module.set_budget(floor_bytes)
        link, steps = module.link, len(module.program.methods[0].schedule.steps)
    words = [example, program, program.with_suffix(".ptd"), str(floor_bytes), "5", str(WIDTH), "--runs", "3"]
    done = subprocess.run([*words, "--calibrate"], input=x.numpy().tobytes(), capture_output=True, check=True)
    # The runs with a trace are more of the same, which nobody sees.
    once = subprocess.run(words, input=x.numpy().tobytes(), capture_output=True, check=True)
    assert done.stdout == once.stdout and len(done.stdout) == 4 * 5 * (WIDTH // 2)
    said = done.stderr.decode()
    times = re.findall(r"^step (\d+): (\d+) ns$", said, re.MULTILINE)
    assert [int(step) for step, _ in times] == list(range(steps))
    assert f"{steps} steps: {sum(int(ns) for _, ns in times) / 1e6:.3f} ms\n" in said
    sizes = re.findall(r"^link: copies of (\d+) bytes at [\d.]+ GB/s$", said, re.MULTILINE)
    assert sizes and [int(size) for size in sizes[1:]] == [int(one.piece_bytes) for one in link[1:]]


def test_graphs_are_refused_on_a_cpu(example: Path, lowered: Callable[[str], Path]) -> None:
    program = lowered("chain")
    words = [example, program, program.with_suffix(".ptd"), "default", "5", str(WIDTH), "--cuda-graph"]
    done = subprocess.run(words, input=random_rows(5).numpy().tobytes(), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"weight_offload_cuda_graph does not go with a CPU: only a CUDA device has graphs" in done.stderr


def test_a_budget_that_cannot_be_set_leaves_the_old_one(run_model: Run, lowered: Callable[[str], Path]) -> None:
    with penstock.Module(lowered("chain"), EVERYTHING) as module:
        floor_bytes, full_bytes = module.floor_bytes, module.budget_bytes
        with pytest.raises(BelowFloorError) as refused:
            module.set_budget(floor_bytes - 1)
    refusals = {
        # Word for word; what other placements would take, only Python knows.
        floor_bytes - 1: str(refused.value).partition(". That is for placement")[0],
        "1 Gib": "weight_offload_budget: '1 Gib' has the unit 'Gib', which is unknown or ambiguous; valid: ",
    }
    for budget, said in refusals.items():
        done = run_model(lowered("chain"), full_bytes, random_rows(5), budget)
        assert done.returncode == 1
        assert said in done.stderr.decode()
        assert b"budget not set: error 0x12" in done.stderr
        assert figures(done.stderr, "runs") == [1]


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
        "-1": b"weight_offload_budget: '-1' is negative; valid: ",
        "12abc": b"weight_offload_budget: '12abc' has the unit 'abc', which is unknown or ambiguous; valid: ",
        "9" * 300: b"255 characters or more",
    }
    for budget, said in refusals.items():
        done = run_model(lowered("chain"), budget, random_rows(5))
        assert done.returncode == 1
        assert said in done.stderr
        assert b"error 0x12" in done.stderr
