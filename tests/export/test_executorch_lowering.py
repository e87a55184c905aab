"""An offloaded program is what ExecuTorch's lowering takes: fetches survive it with their numbers and names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.harness import offloaded

exir = pytest.importorskip("executorch.exir")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.head(self.norm(self.embed(ids)) * self.count)


def fetch_arguments(program: torch.export.ExportedProgram) -> list[tuple[int, str]]:
    return sorted(
        (node.args[1], node.args[2])
        for node in program.graph.nodes
        if node.op == "call_function"
        and "penstock.fetch" in str(node.target).replace("penstock_fetch", "penstock.fetch")
    )


def test_to_edge_transform_and_lower_keeps_every_fetch() -> None:
    torch.manual_seed(0)
    program = offloaded(Small(), (torch.arange(5),))
    before = fetch_arguments(program)
    assert len(before) == 4
    lowered = exir.to_edge_transform_and_lower(program).exported_program()
    assert fetch_arguments(lowered) == before
    assert [s.target for s in lowered.graph_signature.output_specs if s.target] == ["count"]
    # Still the same numbers, run as the edge dialect.
    ids = torch.tensor([3, 1, 2, 0, 7])
    torch.testing.assert_close(lowered.module()(ids), offloaded(small_with(program), (ids,)).module()(ids))


def small_with(program: torch.export.ExportedProgram) -> Small:
    model = Small()
    model.load_state_dict({**program.state_dict, "count": torch.zeros(1)})
    return model
