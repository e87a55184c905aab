"""Kernels on a GPU that read weights where they lie in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import InputError
from tests.gpu import programs
from tests.gpu.test_runtime_cuda import compiled, device_bytes, generate, resident, same

__all__ = ["compiled", "resident"]  # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TABLE_BYTES = programs.Routed.VOCABULARY * programs.Routed.WIDTH * 2


def outputs(module: penstock.Module, runs: int = 5) -> list[torch.Tensor]:
    tokens = torch.arange(4, device="cuda")
    return [module((tokens * 7919 + run * 31) % programs.Routed.VOCABULARY) for run in range(runs)]


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_tables_and_experts_take_no_device_memory(compiled: dict[str, Path], cuda_graph: bool) -> None:
    path = compiled["routed"]
    with penstock.Module(path, "64GiB", placement="stream") as module:
        wanted = outputs(module)
        streamed_floor = module.floor_bytes
    with penstock.Module(path, "64GiB") as module:
        floor, full = module.floor_bytes, module.budget_bytes
        assert not module.plan.direct_weights  # type: ignore[union-attr]
        assert same(outputs(module), wanted)
    # Not by all of the experts: without them other weights that are needed together set it.
    assert floor < streamed_floor
    with penstock.Module(path, "64GiB", cuda_graph=cuda_graph) as module:
        outputs(module)  # kernels are loaded, and torch has made its streams: tens of MiB that no module takes
    del module
    for part in range(5):
        budget = floor + (full - floor) * part // 4
        torch.cuda.empty_cache()
        before = device_bytes()
        with penstock.Module(path, budget, cuda_graph=cuda_graph) as module:
            assert module.plan is not None
            # Measured before torch computes anything: what the module itself took.
            assert device_bytes() - before <= budget + 8 * 2**20
            assert ("experts" in module.plan.direct_weights) == (part < 4)
            for _ in range(3):
                assert same(outputs(module), wanted), part
            last, plan = module.last_run, module.plan.method("forward").warm
            assert (last.bytes_streamed, last.copies, last.bytes_hit) == (
                plan.bytes_streamed,
                plan.copies,
                plan.bytes_hit,
            )


@pytest.mark.parametrize("name", ["routed", "decoder"])
def test_everything_read_in_place(
    compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int], name: str
) -> None:
    """Library products and generated kernels alike read host memory; not a byte is held for weights."""
    path = compiled[name]
    play = outputs if name == "routed" else generate
    with penstock.Module(path, "64GiB", placement="stream") as module:
        wanted = play(module)
    with penstock.Module(path, 0, placement="in-place") as module:
        for _ in range(3):
            assert same(play(module), wanted)
        assert module.device_memory() == (0, 0)
        assert module.stats().copies == 0
        module.set_budget(TABLE_BYTES)
        assert same(play(module), wanted)
        assert 0 < module.device_memory()[1] <= TABLE_BYTES


def test_indices_on_the_device_are_checked_where_asked(compiled: dict[str, Path]) -> None:
    """They would be read from the device first, so that is an option; without it they are the program's own affair."""
    path = compiled["routed"]
    with penstock.Module(path, "64GiB", check_indices=True) as module:
        wanted = outputs(module)
        for bad in (programs.Routed.VOCABULARY, -programs.Routed.VOCABULARY - 1):
            with pytest.raises(InputError, match=f"is {bad} at"):
                module(torch.tensor([0, 1, bad, 2], device="cuda"))
        assert same(outputs(module), wanted)


def test_an_automatic_budget_again(compiled: dict[str, Path]) -> None:
    with penstock.Module(compiled["routed"], "64GiB") as module:
        wanted, full = outputs(module), module.budget_bytes
        module.set_budget(module.floor_bytes)
        assert same(outputs(module), wanted)
        module.set_budget("auto")
        assert module.floor_bytes < module.budget_bytes <= full
        assert same(outputs(module), wanted)
