"""Rows that kernels cannot read where they lie: a grouped product copies them, once a call, and keeps no copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.experts.routed import Shape, grouped_mm, routed
from tests.harness import compiled, offloaded
from tests.runtime.footprint import footprint

SHAPE = Shape(layers=1, hidden=512)
ROWS = 512
ROWS_BYTES = ROWS * SHAPE.hidden * SHAPE.dtype.itemsize
RUNS = 4


class Behind(nn.Module):
    """Multiplies what lies behind the first number of x: it begins at no multiple of sixteen bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: Any = routed(SHAPE).layers[0]

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(x[1:].view(ROWS, SHAPE.hidden), self.experts.gate_up.transpose(-2, -1), ends)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers.integrations.moe  # noqa: F401  registers the op

    given = torch.zeros(ROWS * SHAPE.hidden + 1), torch.zeros(SHAPE.experts, dtype=torch.int32)
    return compiled(tmp_path_factory.mktemp("operands"), offloaded(Behind(), given)).program_path


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_a_copy_of_the_rows_is_made_once_and_given_back(path: Path, part: float) -> None:
    """Read in host memory, and in device memory: a copy for every expert would be as many times these bytes."""
    x = torch.randn(ROWS * SHAPE.hidden + 1, generator=torch.Generator().manual_seed(1))
    ends = torch.arange(1, SHAPE.experts + 1, dtype=torch.int32) * (ROWS // SHAPE.experts)
    with torch.no_grad():
        wanted = Behind().eval()(x, ends)
    with penstock.Module(path, "1TiB") as module:
        budget = module.floor_bytes + int(part * (module.full_bytes - module.floor_bytes))
    with penstock.Module(path, budget) as module:
        assert module.plan is not None and bool(module.plan.direct_weights) == (part == 0.0)
        for _ in range(2):
            torch.testing.assert_close(module(x, ends), wanted, rtol=1e-4, atol=1e-4)
        before_bytes = footprint().anonymous_bytes
        for _ in range(RUNS):
            module(x, ends)
        assert footprint().anonymous_bytes - before_bytes < RUNS * ROWS_BYTES
