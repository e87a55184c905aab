"""Ends that an input says, and that rows do not keep to: the call that has them may be wrong, and no call after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from tests.experts.routed import Shape, grouped_mm, routed
from tests.harness import compiled, offloaded

SHAPE = Shape(layers=1)


class Some(nn.Module):
    """The rows that are kept, in groups that end where the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: Any = routed(SHAPE).layers[0]

    def forward(self, x: Tensor, keep: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(x[keep], self.experts.gate_up.transpose(-2, -1), ends).sum(0)


def test_groups_of_no_rows_leave_no_slot_without_its_expert(tmp_path: Path) -> None:
    import transformers.integrations.moe  # noqa: F401  registers the op

    x = torch.randn(4, SHAPE.hidden, generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([1, 3, *[4] * (SHAPE.experts - 2)], dtype=torch.int32)
    all_kept = torch.ones(4, dtype=torch.bool)
    path = compiled(tmp_path, offloaded(Some(), (x, torch.tensor([True, True, False, True]), ends))).program_path
    with penstock.Module(path, "1TiB") as module:
        wanted = module(x, all_kept, ends)
        budget = module.floor_bytes + (module.full_bytes - module.floor_bytes) // 2
    with penstock.Module(path, budget) as module:
        assert module.plan is not None and module.plan.banks
        module(x, ~all_kept, ends)
        assert torch.equal(module(x, all_kept, ends), wanted)
        assert (module.last_run.expert_hits, module.last_run.expert_misses) == (3, 0)
