"""Experts in slots on a GPU: the same bits whatever lies in slots, in runs and in graphs, and the counts of a second
cache, which decides as the kernels should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from tests.experts.reference import ReferenceTable
from tests.experts.routed import Routed, Shape, compiled, routed, routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# 32 experts of 9 MiB in each of three layers: a prompt's groups are multiplied in several parts.
SHAPE = Shape(layers=3, experts=32, top=4, hidden=1024, inner=1536, dtype=torch.bfloat16)
TOKENS = 200
PROMPT = 96
ALL_BYTES = SHAPE.layers * (SHAPE.experts * SHAPE.expert_bytes + 2 * SHAPE.hidden**2)


@pytest.fixture(scope="module")
def model() -> Routed:
    return routed(SHAPE)


@pytest.fixture(scope="module")
def path(model: Routed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(model, tmp_path_factory.mktemp("experts") / "model.pt2", "cuda", prompt=PROMPT)


def inputs(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, SHAPE.hidden, generator=torch.Generator().manual_seed(seed))
    return x.to("cuda", torch.bfloat16), routing(SHAPE, tokens, stay=0.5, seed=seed).cuda()


@pytest.fixture(scope="module")
def wanted(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Every decoded token, and a prompt, with everything resident."""
    x, ids = inputs(TOKENS)
    prompt, prompt_ids = inputs(PROMPT, seed=3)
    with penstock.Module(path, "64GiB") as module:
        assert module.plan is not None and not module.plan.banks and not module.plan.direct_weights
        tokens = [module.run_method("decode", x[t : t + 1], ids[t].unsqueeze(1)) for t in range(TOKENS)]
        return torch.cat(tokens), module.run_method("prefill", prompt, prompt_ids.transpose(0, 1).contiguous())


def layers_of(module: penstock.Module) -> list[int]:
    assert module.plan is not None
    return [int(bank.members[0].weight.split(".")[1]) for bank in module.plan.banks]


def tables_of(module: penstock.Module) -> list[ReferenceTable]:
    assert module.plan is not None
    return [ReferenceTable(bank.experts, bank.slots) for bank in module.plan.banks]


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.2, 0.5, 0.9])
def test_bits_and_counts(path: Path, wanted: tuple[torch.Tensor, ...], part: float, cuda_graph: bool) -> None:
    x, ids = inputs(TOKENS)
    cpu_ids = ids.tolist()
    with penstock.Module(path, "64GiB") as module:
        floor_bytes = module.floor_bytes
    with penstock.Module(path, max(floor_bytes, int(ALL_BYTES * part)), cuda_graph=cuda_graph) as module:
        tables, layers = tables_of(module), layers_of(module)
        assert bool(tables) == (part >= 0.1)
        for token in range(TOKENS):
            got = module.run_method("decode", x[token : token + 1], ids[token].unsqueeze(1))
            assert torch.equal(got[0], wanted[0][token]), token
            counts = [table.take(cpu_ids[token][layer]) for table, layer in zip(tables, layers, strict=True)]
            if token % 20 == 19:
                last = module.last_run
                assert (last.expert_hits, last.expert_misses) == tuple(map(sum, zip((0, 0), *counts, strict=True)))
        total = module.stats()
        assert (total.replays > 0) == cuda_graph
        assert total.expert_hits == sum(table.hits for table in tables)
        assert total.expert_misses == sum(table.misses for table in tables)
        assert module.device_memory()[1] <= module.budget_bytes


def test_a_prompt_is_read_in_groups(path: Path, model: Routed, wanted: tuple[torch.Tensor, ...]) -> None:
    """However it is divided: torch's product of groups gives each row the same bits among all groups and among few."""
    x, ids = inputs(PROMPT, seed=3)
    turned = ids.transpose(0, 1).contiguous()
    model.form = "grouped"
    with torch.no_grad():
        eager = model.cuda()(x, turned).float()
    model.cpu()
    # Compiled code rounds to bfloat16 less often. A wrong expert would be off by as much as the result is large.
    assert torch.linalg.norm(wanted[1].float() - eager) < 0.05 * torch.linalg.norm(eager)
    steps, step_ids = inputs(TOKENS)
    for part in (0.0, 0.3, 0.8):
        with penstock.Module(path, "64GiB") as module:
            module.set_budget(max(module.floor_bytes, int(ALL_BYTES * part)))
            tables, layers = tables_of(module), layers_of(module)
            for _ in range(2):
                got = module.run_method("prefill", x, turned)
                assert torch.equal(got, wanted[1]), part
                for table, layer in zip(tables, layers, strict=True):
                    table.group(torch.bincount(ids[:, layer].flatten(), minlength=SHAPE.experts).tolist())
            for token in range(20):
                got = module.run_method("decode", steps[token : token + 1], step_ids[token].unsqueeze(1))
                assert torch.equal(got[0], wanted[0][token])
                for table, layer in zip(tables, layers, strict=True):
                    table.take(step_ids[token, layer].tolist())
            total = module.stats()
            assert total.expert_hits == sum(table.hits for table in tables)
            assert total.expert_misses == sum(table.misses for table in tables)
