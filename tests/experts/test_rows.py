"""How many rows a call takes: none, a few, and more than one move of the core carries; by index and in groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.experts.reference import ReferenceTable
from tests.experts.routed import Shape, grouped_mm, routed
from tests.harness import FAST

SHAPE = Shape(layers=1)


class Kept(nn.Module):
    """Of some tokens only those that are kept, each by one expert: how many that are only the run itself says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.experts = routed(SHAPE).layers[0]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        kept = ids[ids >= 0]
        rows = x[ids >= 0]
        if self.form == "batched":
            out = torch.bmm(self.experts.down[kept], rows.unsqueeze(-1)).squeeze(-1)
        else:
            experts, order = torch.sort(kept)
            ends = (experts[:, None] == torch.arange(SHAPE.experts)).sum(0).cumsum(0).to(torch.int32)
            out = grouped_mm(rows[order], self.experts.down.transpose(-2, -1), ends)
        return out.sum(0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers.integrations.moe  # noqa: F401  registers the op

    programs = {}
    for form in ("batched", "grouped"):
        x, ids = torch.zeros(7, SHAPE.inner), torch.tensor([0, -1, 3, 2, -1, 1, 1])
        tokens = torch.export.Dim("tokens", min=2, max=6000)
        with torch.no_grad():
            ep = torch.export.export(
                Kept(form).eval(), (x, ids), dynamic_shapes=({0: tokens}, {0: tokens}), strict=False
            )
        programs[form] = penstock.apply_weight_offload(ep)
    path = tmp_path_factory.mktemp("rows") / "model.pt2"
    penstock.compile(programs, path, device="cpu", inductor_configs=FAST)
    return path


@pytest.mark.parametrize("form", ["batched", "grouped"])
def test_any_number_of_rows(path: Path, form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    calls = [torch.randint(-1, SHAPE.experts, (count,), generator=generator) for count in (2, 40, 4097, 5000, 6000)]
    calls += [torch.full((3,), -1), calls[1], torch.full((3,), -1)]
    given = [(torch.randn(len(ids), SHAPE.inner, generator=generator), ids) for ids in calls]
    with penstock.Module(path, "1TiB") as module:
        wanted = [module.run_method(form, *one) for one in given]
        budget = module.floor_bytes + (module.full_bytes - module.floor_bytes) // 2
    model = Kept(form).eval()
    with torch.no_grad():
        torch.testing.assert_close(wanted[:3], [model(*one) for one in given[:3]], rtol=1e-4, atol=1e-4)
    with penstock.Module(path, budget) as module:
        assert module.plan is not None
        (bank,) = module.plan.banks
        table = ReferenceTable(bank.experts, bank.slots)
        for (x, ids), expected in zip(given, wanted, strict=True):
            assert torch.equal(module.run_method(form, x, ids), expected)
            kept = ids[ids >= 0]
            rows = torch.bincount(kept, minlength=SHAPE.experts).tolist()
            counts = table.take(kept.tolist()) if form == "batched" else table.group(rows)
            last = module.last_run
            assert (last.expert_hits, last.expert_misses) == counts
            assert last.expert_bytes == counts[1] * bank.row_bytes
        assert (last.expert_hits, last.expert_misses) == (0, 0)
        assert module.expert_uses()[0].calls == len(given)
