"""Experts in slots of a .pte: the same bits and the same counts, from Python and from a process without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.executorch.cpp_program import build_program
from tests.executorch.players import CppPlayer
from tests.experts.routed import Shape, routed, routing
from tests.harness import FAST, offloaded

SHAPE = Shape(layers=2)
TOKENS = 40
PARTS = (0.0, 0.4, 0.8)


class OneInput(nn.Module):
    """The routing behind the token: what a process in C++ is told by tests is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = routed(SHAPE)

    def forward(self, given: Tensor) -> Tensor:
        x, ids = given.split((SHAPE.hidden, SHAPE.layers * SHAPE.top), -1)
        out: Tensor = self.routed(x, ids.to(torch.int64).view(SHAPE.layers, 1, SHAPE.top))
        return out


def tokens() -> list[Tensor]:
    x = torch.randn(TOKENS, SHAPE.hidden, generator=torch.Generator().manual_seed(1))
    ids = routing(SHAPE, TOKENS, stay=0.5, seed=1).flatten(1).float()
    return list(torch.cat((x, ids), 1).split(1))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "model.pte"
    penstock.executorch.export(offloaded(OneInput().eval(), (tokens()[0],)), path, device="cpu", inductor_configs=FAST)
    return path


@pytest.fixture(scope="module")
def wanted(program: Path) -> list[Tensor]:
    with penstock.Module(program, "1TiB") as module:
        return [module(token) for token in tokens()]


def budgets(program: Path) -> list[int]:
    with penstock.Module(program, "1TiB") as module:
        return [max(module.floor_bytes, int(module.full_bytes * part)) for part in PARTS]


def test_from_python(program: Path, wanted: list[Tensor]) -> None:
    for budget, part in zip(budgets(program), PARTS, strict=True):
        with penstock.Module(program, budget) as module:
            assert all(torch.equal(module(token), each) for token, each in zip(tokens(), wanted, strict=True))
            total = module.stats()
            assert (total.expert_hits > 0) == (part > 0)
            if part:
                assert total.expert_hits + total.expert_misses == TOKENS * SHAPE.top * SHAPE.layers
                assert total.expert_bytes == total.expert_misses * SHAPE.expert_bytes


def test_a_process_without_python_has_slots_too(
    program: Path, wanted: list[Tensor], library: Path, tmp_path: Path
) -> None:
    source = Path(__file__).parent / "behaviour_probe.cpp"
    player = CppPlayer(build_program(source, library, tmp_path / "behaviour_probe"))
    weights = program.with_suffix(".ptd")
    try:
        for budget, part in zip(budgets(program), PARTS, strict=True):
            player.open(program, weights, budget)
            got = [player.run("forward", token) for token in tokens()]
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
            hits, misses = (player.figure(f"expert_{name}") for name in ("hits", "misses"))
            assert (hits > 0) == (part > 0)
            if part:
                assert hits + misses == TOKENS * SHAPE.top * SHAPE.layers
    finally:
        player.close()
