"""Experts that one method takes by index and another reads whole: right at every budget, and it is said that none has a
slot."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import penstock
from penstock.cli.program_report import program_report
from penstock.cli.subject import read_subject
from penstock.plan.plan import NO_SLOTS


class Mixed(nn.Module):
    """As where numbers are dequantized all at once for prompts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.mixed = nn.Parameter(torch.randn(8, 32, 64, generator=generator))
        self.taken = nn.Parameter(torch.randn(8, 32, 64, generator=generator))
        self.is_prompt = False

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mixed = (self.mixed * 2)[ids] if self.is_prompt else self.mixed[ids] * 2
        return torch.bmm(mixed, x.expand(2, -1, -1)) + torch.bmm(self.taken[ids.flip(0)], x.expand(2, -1, -1))


def test_it_is_said_of_which_experts_there_are_no_slots(tmp_path: Path) -> None:
    model, x, programs = Mixed().eval(), torch.randn(64, 1, generator=torch.Generator().manual_seed(1)), {}
    for name in ("decode", "prefill"):
        model.is_prompt = name == "prefill"
        with torch.no_grad():
            exported = torch.export.export(model, (x, torch.tensor([3, 5])), strict=False)
        programs[name] = penstock.apply_weight_offload(exported)
    path = tmp_path / "mixed.pt2"
    penstock.compile(programs, path, device="cpu")
    assert program_report(read_subject(path)).without_slots == {"mixed": "method 'prefill' reads all of 'mixed'"}
    with penstock.Module(path, "1TiB") as module:
        full_bytes, floor_bytes = module.full_bytes, module.floor_bytes
        wanted = {name: module.run_method(name, x, torch.tensor([6, 1])) for name in programs}
        assert "no slots" not in module.summary, "everything is held"
    remark = "no slots for 1 weight of experts (penstock inspect says why)"
    with penstock.Module(path, floor_bytes) as module:
        for budget_bytes in range(floor_bytes, full_bytes, (full_bytes - floor_bytes) // 4):
            module.set_budget(budget_bytes)
            for name in programs:
                assert torch.equal(module.run_method(name, x, torch.tensor([6, 1])), wanted[name])
            assert module.plan is not None and not any(
                member.weight == "mixed" for bank in module.plan.banks for member in bank.members
            )
            placed = {one.bank for method in module.plan.methods for one in method.placements if one.weight == "mixed"}
            assert (remark in module.summary) == (NO_SLOTS in placed)
            if budget_bytes == floor_bytes:
                assert NO_SLOTS in placed
