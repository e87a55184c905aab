"""The runtime on a GPU: the behaviours that tests/runtime shows on the soft driver, with memory as the driver sees it.

Device memory is read for the whole GPU, so these tests want it to themselves: run them without xdist.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock import errors
from penstock.plan.tuning import COPY_OVERHEAD_BYTES
from penstock.runtime.plan_installer import FIRST_RUNS
from tests.gpu import programs
from tests.harness import bits
from tests.native.session import copy_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FRACTIONS = (0.0, 0.2, 0.5, 0.8, 1.0)
WAYS = (("auto", "registered"), ("auto", "1GiB"), ("lru", "registered"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = os.environ.get("PENSTOCK_GPU_PROGRAMS")
    return programs.compile_all(Path(folder) if folder else tmp_path_factory.mktemp("gpu_programs"))


@pytest.fixture(autouse=True)
def _quiet_device() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def device_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def generate(module: penstock.Module, tokens: int = 4) -> list[torch.Tensor]:
    """Prefill, then decode: methods take turns, and share the cache."""
    module.reset_state()
    prompt = torch.arange(8, device="cuda")[None] * 7 % programs.DECODER.vocab
    outputs = [module.run_method("prefill", prompt.clone(), torch.arange(8, device="cuda"))]
    for step in range(tokens):
        token = outputs[-1].argmax(-1).reshape(1, 1)
        outputs.append(module.run_method("decode", token, torch.full((1,), 8 + step, device="cuda")))
    return outputs


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="session")
def resident(compiled: dict[str, Path]) -> tuple[list[torch.Tensor], int]:
    """The outputs with every weight resident, and what that takes."""
    with penstock.Module(compiled["decoder"], budget="64GiB") as module:
        return generate(module), module.budget_bytes


def floor_of(path: Path, placement: str, host_memory: str = "registered") -> int:
    with pytest.raises(errors.BelowFloorError) as caught:
        penstock.Module(path, budget=0, placement=placement, host_memory=host_memory)
    return caught.value.floor_bytes


@pytest.mark.parametrize("poison", ["0", "1"])
@pytest.mark.parametrize(("placement", "host_memory"), WAYS)
def test_budgets(
    compiled: dict[str, Path],
    resident: tuple[list[torch.Tensor], int],
    placement: str,
    host_memory: str,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit-identical from floor to 100%, on changing streams, with what the driver lends never above the budget."""
    monkeypatch.setenv("PENSTOCK_POISON", poison)
    wanted, full = resident
    floor = floor_of(compiled["decoder"], placement, host_memory)
    with pytest.raises(errors.BelowFloorError):
        penstock.Module(compiled["decoder"], budget=floor - 1, placement=placement, host_memory=host_memory)
    streamed, costs = [], []
    for fraction in FRACTIONS:
        budget = floor + int((full - floor) * fraction)
        with penstock.Module(
            compiled["decoder"], budget=budget, placement=placement, host_memory=host_memory
        ) as module:
            for run in range(4):
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
                    assert same(generate(module), wanted), (fraction, run)
                torch.cuda.current_stream().wait_stream(side)
            held, peak = module.device_memory()
            assert held <= budget and peak <= budget
            streamed.append(module.last_run.bytes_streamed)
            costs.append(streamed[-1] + module.last_run.copies * COPY_OVERHEAD_BYTES)
            if module.plan is not None:
                plan = module.plan.method("decode")
                last = module.last_run
                assert (last.bytes_streamed, last.copies, last.bytes_hit) == (
                    plan.warm.bytes_streamed,
                    plan.warm.copies,
                    plan.warm.bytes_hit,
                )
                assert held == peak == module.plan.device_bytes
            else:
                assert module.last_run.pool_calls > 0
    assert streamed[0] > 0
    if placement == "auto":
        assert costs == sorted(costs, reverse=True)
        assert streamed[-1] == 0


@pytest.mark.parametrize(("placement", "host_memory"), WAYS)
def test_device_memory_as_the_driver_sees_it(
    compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int], placement: str, host_memory: str
) -> None:
    wanted, _ = resident
    floor = floor_of(compiled["decoder"], placement, host_memory)
    slack = 4 << 20  # events, streams and pinned buffers are bookkeeping of the driver, in steps of 2 MiB
    for budget in (floor, floor + (40 << 20)):
        with penstock.Module(compiled["decoder"], budget="64GiB") as module:
            generate(module)  # kernels are loaded and the allocator has what it needs
        del module
        torch.cuda.empty_cache()
        before = device_bytes()
        module = penstock.Module(compiled["decoder"], budget=budget, placement=placement, host_memory=host_memory)
        state = module.state_bytes
        assert device_bytes() - before <= budget + state + slack + (2 << 20)
        assert same(generate(module), wanted)
        torch.cuda.empty_cache()
        assert device_bytes() - before <= budget + state + slack + (32 << 20)  # outputs still referenced, workspaces
        module.close()
        del module
        torch.cuda.empty_cache()
        assert abs(device_bytes() - before) <= slack + (32 << 20)


@pytest.mark.parametrize(("placement", "host_memory"), WAYS)
def test_slow_kernels_and_slow_copies(compiled: dict[str, Path], placement: str, host_memory: str) -> None:
    """At the floor, with spin kernels inside the program and on both streams between runs, many runs ahead."""
    torch.manual_seed(1)
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    with penstock.Module(compiled["slow_chain"], budget="64GiB") as module:
        wanted = module(x)
        full = module.budget_bytes
    floor = floor_of(compiled["slow_chain"], placement)
    delays = random.Random(7)
    for budget in (floor, (floor + full) // 2):
        with penstock.Module(
            compiled["slow_chain"], budget=budget, placement=placement, host_memory=host_memory
        ) as module:
            copies = torch.cuda.ExternalStream(copy_stream(module._session))
            outputs = []
            for _ in range(30):
                torch.cuda._sleep(delays.randrange(2_000_000))
                with torch.cuda.stream(copies):
                    torch.cuda._sleep(delays.randrange(2_000_000))
                outputs.append(module(x))
            torch.cuda.synchronize()
            assert all(torch.equal(bits(y), bits(wanted)) for y in outputs)
            assert module.device_memory()[1] <= budget
            assert module.stats().runs == 30
            assert module.last_run.stall_ns >= 0
            if module.plan is not None:
                plan = module.plan.method("forward")
                assert module.stats().bytes_streamed == plan.cold.bytes_streamed + 29 * plan.warm.bytes_streamed


def test_hundredth_run(compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int]) -> None:
    wanted, _ = resident
    with penstock.Module(compiled["decoder"], budget=floor_of(compiled["decoder"], "auto")) as module:
        for run in range(100):
            outputs = generate(module)
            if run in (0, 1, 50, 99):
                assert same(outputs, wanted), run
        assert module.stats().runs == 500


def test_state_is_ordered_across_streams(compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int]) -> None:
    """Reset behind a long kernel on one stream, run on another: the run must not see half of the reset."""
    wanted, _ = resident
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    prompt = (torch.arange(8, device="cuda")[None] * 7 % programs.DECODER.vocab).clone()
    positions = torch.arange(8, device="cuda")
    torch.cuda.synchronize()
    with penstock.Module(compiled["decoder"], budget=floor_of(compiled["decoder"], "auto")) as module:
        for _ in range(3):
            generate(module)
            with torch.cuda.stream(first):
                torch.cuda._sleep(50_000_000)
                module.reset_state()
            with torch.cuda.stream(second):
                output = module.run_method("prefill", prompt, positions)
            torch.cuda.synchronize()
            assert torch.equal(bits(output), bits(wanted[0]))


def test_set_budget(compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int]) -> None:
    wanted, full = resident
    floor = floor_of(compiled["decoder"], "auto")
    with penstock.Module(compiled["decoder"], budget=floor) as module:
        for budget in (full, floor + (20 << 20), floor, full // 2 + floor // 2):
            before = module.budget_bytes
            module.set_budget(budget)
            assert module.device_memory()[0] <= budget
            assert module.device_memory()[1] <= max(full, before)
            assert same(generate(module), wanted)
        with pytest.raises(errors.BelowFloorError):
            module.set_budget(floor - 1)
        assert same(generate(module), wanted)


def test_the_first_runs_are_measured_and_planned_again(
    compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int]
) -> None:
    wanted, full = resident
    floor = floor_of(compiled["decoder"], "auto")
    with penstock.Module(compiled["decoder"], budget=(floor + full) // 2, calibration="first-runs") as module:
        assert module.calibration is None
        for _ in range(FIRST_RUNS):
            assert same(generate(module), wanted)
        assert module.calibration is not None
        assert module.device_memory()[1] <= module.budget_bytes
        for _ in range(3):
            assert same(generate(module), wanted)


def test_automatic_budget(compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int]) -> None:
    wanted, full = resident
    with penstock.Module(compiled["decoder"], budget="auto") as module:
        assert module.budget_bytes == full  # everything fits this GPU
        assert same(generate(module), wanted)


def test_capture_is_refused(compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int]) -> None:
    wanted, _ = resident
    floor = floor_of(compiled["slow_chain"], "auto")
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    with penstock.Module(compiled["slow_chain"], budget=floor) as module:
        first = module(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = x * 2  # a capture of nothing is refused by some drivers
            with pytest.raises(errors.CaptureError):
                module(x)
        graph.replay()
        assert held is not None
        assert torch.equal(bits(module(x)), bits(first))
    assert wanted


def test_activations_out_of_memory(compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int]) -> None:
    wanted, _ = resident
    with penstock.Module(compiled["decoder"], budget=floor_of(compiled["decoder"], "auto")) as module:
        generate(module)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
        try:
            with pytest.raises(errors.ActivationMemoryError, match="prefill"):
                length = programs.DECODER.max_len
                prompt = torch.zeros(1, length, dtype=torch.int64).cuda()
                hog = []
                while True:  # until not even the smallest buffer is left
                    hog.append(module.run_method("prefill", prompt, torch.arange(length).cuda()))
        except torch.OutOfMemoryError:
            pytest.skip("the test's own tensors ran out of memory first")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        hog.clear()
        with pytest.raises(errors.StateInvalidError):
            module.read_state(module.program.states[0].name)
        assert same(generate(module), wanted)  # generate resets the state


def test_trace(compiled: dict[str, Path], tmp_path: Path) -> None:
    with penstock.Module(compiled["decoder"], budget=floor_of(compiled["decoder"], "auto")) as module:
        generate(module)
        assert module.plan is not None
        plan = module.plan.method("decode")
        with module.trace(tmp_path / "t.json"):
            for step in range(3):
                module.run_method(
                    "decode", torch.zeros(1, 1, dtype=torch.int64).cuda(), torch.full((1,), 20 + step).cuda()
                )
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        copies = [event for event in events if event.get("cat") == "copy"]
        steps = [event for event in events if event.get("cat") == "compute"]
        assert len(copies) == 3 * plan.warm.copies
        assert sum(event["args"]["bytes"] for event in copies) == 3 * plan.warm.bytes_streamed
        assert len(steps) == 3 * plan.step_count
        for lane in (copies, steps):  # one stream each: nothing overlaps
            for before, after in itertools.pairwise(lane):
                assert before["ts"] + before["dur"] <= after["ts"] + 1


def test_lost_context_is_named(compiled: dict[str, Path]) -> None:
    """A kernel that fails for good: the error says that only a new process helps; close() neither hangs nor raises."""
    script = f"""
import torch, penstock
from penstock import errors
from tests.gpu import programs
x = torch.zeros(4, {programs.SlowChain.SIZES[0]}, dtype=torch.bfloat16, device="cuda")
module = penstock.Module({str(compiled["slow_chain"])!r}, budget="64GiB")
module.set_budget(module.floor_bytes)
module(x)
torch.zeros(4, device="cuda")[torch.full((4,), 10 ** 6, device="cuda")]  # a device-side assertion
try:
    for _ in range(20):
        module(x)
        module.stats()
except errors.StickyDeviceError as error:
    assert "new process" in str(error), error
    print("named")
except Exception as error:
    print(type(error), error)
module.close()
print("closed")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)
    assert result.stdout.split() == ["named", "closed"], result.stdout + result.stderr[-2000:]
