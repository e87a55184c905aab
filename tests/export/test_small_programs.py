"""Small things that real programs do: arguments named like builtins, and compiles from several threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.verify.module import PoisonedModule
from tests.harness import FAST, offloaded


def test_arguments_named_like_builtins_from_two_threads(tmp_path: Path) -> None:
    """nn.Linear's argument is called `input`, which a copied graph renames. The compiler is patched while it runs, so
    the second thread waits for the first."""
    model = nn.Linear(4, 4)
    program = offloaded(model, (torch.ones(2, 4),))
    failures: list[BaseException] = []

    def build(name: str) -> None:
        try:
            penstock.compile(program, tmp_path / f"{name}.pt2", device="cpu", inductor_configs=FAST)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=build, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    x = torch.randn(2, 4)
    for name in ("one", "two"):
        module = PoisonedModule(tmp_path / f"{name}.pt2")
        assert [spec.name for spec in module.program.methods[0].signature.inputs] == ["input"]
        torch.testing.assert_close(module(x), model(x))


def test_a_missing_program_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(penstock.PenstockError, match="model.pt2 does not exist"):
        penstock.read_program(tmp_path / "model.pt2")


class _Router(nn.Module):
    """As in DeepSeek-V3: which group of experts a token goes to, as ones among zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.proj(x)
        chosen = torch.zeros_like(scores).scatter_(1, scores.argmax(1, keepdim=True), 1)
        return chosen.to(torch.float32) / 2


def test_ones_scattered_into_zeros_stay_what_they_were(tmp_path: Path) -> None:
    model = _Router()
    penstock.compile(offloaded(model, (torch.ones(2, 4),)), tmp_path / "model.pt2", device="cpu", inductor_configs=FAST)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(PoisonedModule(tmp_path / "model.pt2")(x), model(x))


class _Dequantized(nn.Module):
    """A prompt through experts in 8 bits: the matrices of a grouped product are computed, and not weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("numbers", torch.randint(-8, 8, (4, 64, 32), dtype=torch.int8, generator=generator))
        self.register_buffer("scales", torch.rand(4, 64, 1, generator=generator).bfloat16())

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        matrices = self.numbers.to(torch.bfloat16) * self.scales
        return torch._grouped_mm(x, matrices.transpose(-2, -1), ends)


def test_grouped_products_of_computed_matrices(tmp_path: Path) -> None:
    """torch 2.11 has no C function for them."""
    model = _Dequantized()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    ends = torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    penstock.compile(offloaded(model, (x, ends)), tmp_path / "model.pt2", device="cpu", inductor_configs=FAST)
    module = PoisonedModule(tmp_path / "model.pt2")
    assert torch.equal(module(x, ends), model(x, ends))
