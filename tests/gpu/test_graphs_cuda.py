"""CUDA graphs: the behaviours that tests/runtime/test_replays.py shows on the soft driver, with real ones. No xdist."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import penstock
from penstock import errors
from penstock.runtime import graphs
from penstock.runtime.session import Session
from tests.gpu import programs
from tests.gpu.test_runtime_cuda import compiled, floor_of, generate, resident, same
from tests.harness import bits
from tests.native.session import copy_stream

__all__ = ["compiled", "resident"]  # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = programs.Accumulator.WIDTH


@pytest.fixture(autouse=True)
def _quiet_device() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def traffic(module: penstock.Module) -> tuple[int, int, int]:
    last = module.last_run
    return last.bytes_streamed, last.copies, last.bytes_hit


def warm(module: penstock.Module, method: str) -> tuple[int, int, int]:
    assert module.plan is not None
    planned = module.plan.method(method).warm
    return planned.bytes_streamed, planned.copies, planned.bytes_hit


@pytest.mark.parametrize("poison", ["0", "1"])
def test_budgets(
    compiled: dict[str, Path],
    resident: tuple[list[torch.Tensor], int],
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two methods with state, from floor to 100%, on changing streams."""
    monkeypatch.setenv("PENSTOCK_POISON", poison)
    wanted, full = resident
    floor = floor_of(compiled["decoder"], "auto")
    for fraction in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = floor + int((full - floor) * fraction)
        with penstock.Module(compiled["decoder"], budget=budget, cuda_graph=True) as module:
            for run in range(5):
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
                    assert same(generate(module), wanted), (fraction, run)
                torch.cuda.current_stream().wait_stream(side)
            assert module.last_run.replays == 1
            assert module.stats().replays == module.stats().runs - 2
            assert traffic(module) == warm(module, "decode")
            assert module.device_memory()[1] <= budget


def test_slow_kernels_and_slow_copies(compiled: dict[str, Path]) -> None:
    """At the floor, with spin kernels inside the graph and on both streams between launches, many launches ahead."""
    torch.manual_seed(1)
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    with penstock.Module(compiled["slow_chain"], budget="64GiB") as module:
        wanted = module(x)
        full = module.budget_bytes
    floor = floor_of(compiled["slow_chain"], "auto")
    delays = random.Random(7)
    for budget in (floor, (floor + full) // 2):
        with penstock.Module(compiled["slow_chain"], budget=budget, cuda_graph=True) as module:
            copies = torch.cuda.ExternalStream(copy_stream(module._session))
            outputs = [module(x)]
            for _ in range(30):
                torch.cuda._sleep(delays.randrange(2_000_000))
                with torch.cuda.stream(copies):
                    torch.cuda._sleep(delays.randrange(2_000_000))
                outputs.append(module(x))
            torch.cuda.synchronize()
            assert all(torch.equal(bits(y), bits(wanted)) for y in outputs)
            assert module.stats().replays == 30
            assert module.plan is not None
            plan = module.plan.method("forward")
            assert module.stats().bytes_streamed == plan.cold.bytes_streamed + 30 * plan.warm.bytes_streamed


def test_anything_in_between_is_seen(compiled: dict[str, Path], tmp_path: Path) -> None:
    """Several shapes, fresh inputs, runs that are no replays, refused calls, changes of budget, streams: in any order.
    Outputs are in memory of their own, and an input that the program writes gets what was written."""
    choose = random.Random(3)
    torch.manual_seed(3)
    floor = floor_of(compiled["accumulator"], "auto")
    with (
        penstock.Module(compiled["accumulator"], budget="64GiB") as resident,
        penstock.Module(compiled["accumulator"], budget=floor, cuda_graph=True) as module,
    ):
        full = resident.budget_bytes
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for turn in range(120):
            x = torch.randn(choose.choice((2, 5, 16)), WIDTH, device="cuda").bfloat16()
            total, other = (torch.full((WIDTH,), float(turn), dtype=torch.bfloat16, device="cuda") for _ in range(2))
            wanted = resident(x, other)
            if choose.random() < 0.1:
                module.set_budget(choose.choice((floor, floor + (8 << 20), full)))
            if choose.random() < 0.1:
                with pytest.raises(errors.InputError):
                    module(x.float(), total)
            stream = choose.choice(streams)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if choose.random() < 0.2:
                    with module.trace(tmp_path / "trace.json"):
                        got = module(x, total)
                    assert module.last_run.replays == 0
                elif choose.random() < 0.5:
                    with torch.inference_mode():
                        got = module(x, total)
                else:
                    got = module(x, total)
            torch.cuda.current_stream().wait_stream(stream)
            kept += [(a, b) for a, b in zip((*got, total), (*wanted, other), strict=True)]
        torch.cuda.synchronize()
        assert all(torch.equal(bits(a), bits(b)) for a, b in kept)
        assert module.stats().replays > 40


def test_a_failed_replay_leaves_the_next_one_right(compiled: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    floor = floor_of(compiled["slow_chain"], "auto")
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    with penstock.Module(compiled["slow_chain"], budget=floor, cuda_graph=True) as module:
        first = module(x)
        assert torch.equal(module(x), first)
        with monkeypatch.context() as patch:

            def fail(self: Session) -> None:
                raise RuntimeError("the launch was refused")

            patch.setattr(Session, "launch", fail)
            with pytest.raises(errors.RuntimeFailure, match="the launch was refused"):
                module(x)
        assert torch.equal(module(x), first)
        assert module.plan is not None
        assert module.last_run.replays == 1
        assert module.last_run.bytes_streamed == module.plan.method("forward").cold.bytes_streamed
        assert torch.equal(module(x), first)
        assert traffic(module) == warm(module, "forward")


def test_a_program_that_cannot_be_captured(compiled: dict[str, Path]) -> None:
    x = torch.randn(4, programs.Brancher.WIDTH, dtype=torch.bfloat16, device="cuda")
    with penstock.Module(compiled["brancher"], budget="64GiB") as module:
        wanted = module(x)
    with penstock.Module(compiled["brancher"], budget="64GiB", cuda_graph=True) as module:
        for _ in range(2):
            with pytest.raises(errors.CaptureError, match="'forward' ran, but cannot be captured"):
                module(x)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    # Nothing of it is left: neither on torch's streams and allocator nor on ours.
    with penstock.Module(compiled["brancher"], budget="64GiB") as module:
        assert torch.equal(module(x), wanted)
    y = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    floor = floor_of(compiled["slow_chain"], "auto")
    with penstock.Module(compiled["slow_chain"], budget=floor, cuda_graph=True) as module:
        first = module(y)
        assert torch.equal(module(y), first)
        assert module.last_run.replays == 1


def test_a_call_under_the_caller_s_own_capture_is_refused(compiled: dict[str, Path]) -> None:
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    floor = floor_of(compiled["slow_chain"], "auto")
    with penstock.Module(compiled["slow_chain"], budget=floor, cuda_graph=True) as module:
        first = module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            held = x * 2
            with pytest.raises(errors.CaptureError, match="being captured"):
                module(x)
        graph.replay()
        assert torch.equal(held, x * 2)
        assert torch.equal(module(x), first)


def test_modules_that_one_thread_captured_are_replayed_by_two(compiled: dict[str, Path]) -> None:
    """Their products have one workspace."""
    floor = floor_of(compiled["slow_chain"], "auto")
    rows = [torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    with ExitStack() as stack:
        modules = [
            stack.enter_context(penstock.Module(compiled["slow_chain"], budget=floor, cuda_graph=True)) for _ in rows
        ]
        wanted = [module(x) for module, x in zip(modules, rows, strict=True)]
        torch.cuda.synchronize()
        start = threading.Barrier(len(rows))

        def replay(number: int) -> list[torch.Tensor]:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                return [modules[number](rows[number]) for _ in range(50)]

        with ThreadPoolExecutor(len(rows)) as pool:
            found = list(pool.map(replay, range(len(rows))))
        torch.cuda.synchronize()
        assert all(torch.equal(bits(y), bits(want)) for want, ys in zip(wanted, found, strict=True) for y in ys)
        assert [module.stats().replays for module in modules] == [50, 50]


def test_calibration_and_graphs(compiled: dict[str, Path]) -> None:
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    floor = floor_of(compiled["slow_chain"], "auto")
    with penstock.Module(compiled["slow_chain"], budget=floor + (8 << 20), cuda_graph=True) as module:
        first = module(x)
        with module.calibrate():
            for _ in range(3):
                assert torch.equal(module(x), first)
        for _ in range(3):
            assert torch.equal(module(x), first)
        assert module.last_run.replays == 1
        assert traffic(module) == warm(module, "forward")


def test_old_graphs_are_given_up(compiled: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "REMEMBERED_PASSES", 2)
    floor = floor_of(compiled["accumulator"], "auto")
    total = torch.zeros(WIDTH, dtype=torch.bfloat16, device="cuda")
    with penstock.Module(compiled["accumulator"], budget=floor, cuda_graph=True) as module:
        replays = []
        for rows in (2, 3, 2, 3, 4, 3, 2):
            x = torch.ones(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
            module(x, total)
            replays.append(module.last_run.replays)
        assert replays == [0, 0, 1, 1, 0, 1, 0]
