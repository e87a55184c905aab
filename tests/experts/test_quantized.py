"""Experts in 8 and in 4 bits: rows of numbers and of their scales are taken by the same index, and share slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from tests.experts.reference import ReferenceTable
from tests.experts.routed import Shape, grouped_mm, routing
from tests.harness import FAST

SHAPE = Shape(layers=2, experts=16, top=3, hidden=128, inner=96)
GROUP = 32
TOKENS = 60


class Quantized(nn.Module):
    """Weight-only: numbers with a scale for each group of them, and with a zero too where `zeros`, as HQQ has them."""

    def __init__(self, bits: int, zeros: bool = False) -> None:
        super().__init__()
        self.bits, self.zeros = bits, zeros
        generator = torch.Generator().manual_seed(bits)
        for layer in range(SHAPE.layers):
            for name, rows, columns in (("up", SHAPE.inner, SHAPE.hidden), ("down", SHAPE.hidden, SHAPE.inner)):
                kept = columns if bits == 8 else columns // 2
                numbers = torch.randint(0, 256, (SHAPE.experts, rows, kept), generator=generator, dtype=torch.uint8)
                scales = torch.rand(SHAPE.experts, rows, columns // GROUP, generator=generator) * 0.01
                self.register_buffer(f"{name}_{layer}", numbers.view(torch.int8) if bits == 8 else numbers)
                self.register_buffer(f"{name}_scales_{layer}", scales)
                if zeros:
                    middle = torch.rand(scales.shape, generator=generator) * 15
                    self.register_buffer(f"{name}_zeros_{layer}", middle)

    def matrices(self, name: str, layer: int, ids: Tensor | None) -> Tensor:
        """Of these experts, or of all."""
        numbers, scales = getattr(self, f"{name}_{layer}"), getattr(self, f"{name}_scales_{layer}")
        if ids is not None:
            numbers, scales = numbers[ids], scales[ids]
        if self.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2).to(torch.int8)
            numbers = numbers if self.zeros else numbers - 8
        grouped = numbers.unflatten(-1, (-1, GROUP))
        if self.zeros:
            zeros = getattr(self, f"{name}_zeros_{layer}")
            grouped = grouped - (zeros if ids is None else zeros[ids]).unsqueeze(-1)
        return (grouped * scales.unsqueeze(-1)).flatten(-2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in range(SHAPE.layers):
            up = torch.bmm(self.matrices("up", layer, ids[layer]), x.expand(SHAPE.top, -1).unsqueeze(-1))
            x = x + torch.bmm(self.matrices("down", layer, ids[layer]), F.silu(up)).squeeze(-1).sum(0, keepdim=True)
        return x


@pytest.mark.parametrize(("bits", "zeros"), [(8, False), (4, False), (4, True)])
def test_quantized_experts_have_slots(bits: int, zeros: bool, tmp_path: Path) -> None:
    model = Quantized(bits, zeros).eval()
    x = torch.randn(TOKENS, SHAPE.hidden, generator=torch.Generator().manual_seed(1))
    ids = routing(SHAPE, TOKENS, stay=0.5, seed=1)
    with torch.no_grad():
        program = penstock.apply_weight_offload(torch.export.export(model, (x[:1], ids[0]), strict=False))
    path = tmp_path / "model.pt2"
    penstock.compile(program, path, device="cpu")
    with penstock.Module(path, "1TiB") as module:
        full_bytes = module.full_bytes
        wanted = [module(x[t : t + 1], ids[t]) for t in range(TOKENS)]
    with torch.no_grad():
        torch.testing.assert_close(wanted[0], model(x[:1], ids[0]), rtol=1e-4, atol=1e-2)
    for part in (0.2, 0.5):
        with penstock.Module(path, int(full_bytes * part)) as module:
            assert module.plan is not None
            banks = module.plan.banks
            # Though each use takes its own row of `ids`. Scales and zeros of an expert are too small for slots.
            members = [sorted(member.weight for member in bank.members) for bank in banks]
            assert sorted(members) == [["down_0", "up_0"], ["down_1", "up_1"]]
            layers = [int(names[0][-1]) for names in members]
            tables = [ReferenceTable(bank.experts, bank.slots) for bank in banks]
            for token in range(TOKENS):
                assert torch.equal(module(x[token : token + 1], ids[token]), wanted[token])
                for layer, table in zip(layers, tables, strict=True):
                    table.take(ids[token, layer].tolist())
            assert module.stats().expert_hits == sum(table.hits for table in tables)
            assert module.stats().expert_misses == sum(table.misses for table in tables)


class Prompt(Quantized):
    """Many tokens, in groups: all experts are dequantized for these."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in range(SHAPE.layers):
            experts, order = torch.sort(ids[:, layer].reshape(-1))
            rows = x[order // SHAPE.top]
            ends = (experts[:, None] == torch.arange(SHAPE.experts)).sum(0).cumsum(0).to(torch.int32)
            up = grouped_mm(rows, self.matrices("up", layer, None).transpose(-2, -1), ends)
            out = grouped_mm(F.silu(up), self.matrices("down", layer, None).transpose(-2, -1), ends)
            x = x + out[torch.argsort(order)].view(x.shape[0], SHAPE.top, -1).sum(1)
        return x


def test_a_prompt_that_reads_all_experts_leaves_the_slots_to_decoding(tmp_path: Path) -> None:
    """It streams them, through a ring of its own, and what tokens left in the slots is there when they go on."""
    import transformers.integrations.moe  # noqa: F401  registers the op

    x = torch.randn(TOKENS, SHAPE.hidden, generator=torch.Generator().manual_seed(2))
    ids = routing(SHAPE, TOKENS, stay=0.5, seed=2)
    prompt = x[:20], ids[:20]
    with torch.no_grad():
        exported = {
            "decode": torch.export.export(Quantized(4).eval(), (x[:1], ids[0]), strict=False),
            "prefill": torch.export.export(Prompt(4).eval(), prompt, strict=False),
        }
    path = tmp_path / "model.pt2"
    programs = {name: penstock.apply_weight_offload(one) for name, one in exported.items()}
    penstock.compile(programs, path, device="cpu", inductor_configs=FAST)

    def token(module: penstock.Module, number: int) -> Tensor:
        return module.run_method("decode", x[number : number + 1], ids[number])

    with penstock.Module(path, "1TiB") as module:
        floor_bytes, full_bytes = module.floor_bytes, module.full_bytes
        wanted = module.run_method("prefill", *prompt)
        tokens = [token(module, number) for number in range(TOKENS)]
    with torch.no_grad():
        torch.testing.assert_close(wanted, Prompt(4).eval()(*prompt), rtol=1e-4, atol=1e-2)
    for part in (0.3, 0.6):
        with penstock.Module(path, int(floor_bytes + part * (full_bytes - floor_bytes))) as module:
            assert module.plan is not None
            banks = module.plan.banks
            members = [{member.weight for member in bank.members} for bank in banks]
            assert members and all(names <= {f"up_{layer}", f"down_{layer}"} for layer, names in enumerate(members))
            tables = [ReferenceTable(bank.experts, bank.slots) for bank in banks]
            prefill = module.plan.method("prefill")
            streamed = prefill.cold.bytes_streamed, prefill.warm.bytes_streamed
            for number in range(TOKENS):
                if number % 15 == 7:
                    assert torch.equal(module.run_method("prefill", *prompt), wanted)
                    assert module.last_run.bytes_streamed in streamed
                    assert module.last_run.expert_hits == module.last_run.expert_misses == 0
                assert torch.equal(token(module, number), tokens[number])
                assert module.last_run.bytes_streamed == 0
                for layer, table in enumerate(tables):
                    table.take(ids[number, layer].tolist())
            assert module.stats().expert_hits == sum(table.hits for table in tables) > 0
            assert module.stats().expert_misses == sum(table.misses for table in tables)
