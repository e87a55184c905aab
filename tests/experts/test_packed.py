"""Experts beside packed weights: packed for its program, a file leaves them as they are, and they have their slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import PenstockError
from tests.experts.routed import Shape, compiled, routed, routing

SHAPE = Shape(layers=2, experts=16, top=3, hidden=512, inner=64, dtype=torch.bfloat16)
TOKENS = 40
EXPERT_BYTES = SHAPE.layers * SHAPE.experts * SHAPE.expert_bytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(routed(SHAPE), tmp_path_factory.mktemp("packed") / "model.pt2")


def decoded(module: penstock.Module) -> torch.Tensor:
    x = torch.randn(TOKENS, SHAPE.hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ids = routing(SHAPE, TOKENS, stay=0.5, seed=1)
    return torch.cat([module.run_method("decode", x[t : t + 1], ids[t].unsqueeze(1)) for t in range(TOKENS)])


def test_with_their_program_experts_stay_raw_and_have_slots(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.ptd"
    penstock.pack(path.with_suffix(".ptd"), packed, program=path)
    with penstock.Module(path, "1TiB") as module:
        wanted, full_bytes = decoded(module), module.full_bytes
    assert packed.stat().st_size < path.with_suffix(".ptd").stat().st_size  # the projections are packed
    budget_bytes = full_bytes - EXPERT_BYTES // 2
    with penstock.Module(path, budget_bytes, weights=packed) as module:
        assert module.plan is not None and module.plan.banks
        assert torch.equal(decoded(module), wanted)
        total = module.stats()
        assert total.expert_hits and total.expert_bytes == total.expert_misses * SHAPE.expert_bytes
        assert module.device_memory()[1] <= budget_bytes


def test_packed_without_their_program_experts_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.ptd"
    penstock.pack(path.with_suffix(".ptd"), packed)
    with penstock.Module(path, "1TiB") as module:
        budget_bytes = module.full_bytes - EXPERT_BYTES // 2
    with pytest.raises(PenstockError, match=r"gathers from 'layers\.0\.gate_up', which is packed.*--program"):
        penstock.Module(path, budget_bytes, weights=packed)
