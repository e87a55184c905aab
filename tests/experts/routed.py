"""A mixture of experts whose routing is an input, so that tests choose it; and routings as text has them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock


@dataclass(frozen=True)
class Shape:
    layers: int = 3
    experts: int = 16
    top: int = 2
    hidden: int = 64
    inner: int = 32
    dtype: torch.dtype = torch.float32

    @property
    def expert_bytes(self) -> int:
        return 3 * self.inner * self.hidden * self.dtype.itemsize


class Experts(nn.Module):
    """As transformers stacks them, and its two ways of reading them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.inner, shape.hidden, dtype=shape.dtype))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.inner, dtype=shape.dtype))

    def batched(self, x: Tensor, ids: Tensor) -> Tensor:
        top = self.shape.top
        experts = ids.reshape(-1)
        rows = x.repeat_interleave(top, 0).unsqueeze(-1)
        up = torch.bmm(self.gate_up[experts], rows).squeeze(-1)
        out = torch.bmm(self.down[experts], self._activated(up).unsqueeze(-1)).squeeze(-1)
        return out.view(x.shape[0], top, -1).sum(1)

    def grouped(self, x: Tensor, ids: Tensor) -> Tensor:
        shape = self.shape
        experts, order = torch.sort(ids.reshape(-1))
        rows = x[order // shape.top]
        # 0 to experts: how many rows each has, and where they end.
        counts = (experts[:, None] == torch.arange(shape.experts, device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        up = grouped_mm(rows, self.gate_up.transpose(-2, -1), ends)
        out = grouped_mm(self._activated(up), self.down.transpose(-2, -1), ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=x.device)
        return out[back].view(x.shape[0], shape.top, -1).sum(1)

    def _activated(self, up: Tensor) -> Tensor:
        gate, linear = up.chunk(2, -1)
        return F.silu(gate) * linear


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """torch's own, where it has one for the dtype; else what transformers has in its place."""
    if rows.dtype is torch.bfloat16:
        return torch._grouped_mm(rows, matrices, ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)


class Routed(nn.Module):
    """forward(x [tokens, hidden], ids [layers, tokens, top])"""

    def __init__(self, shape: Shape, form: str = "batched") -> None:
        super().__init__()
        self.shape, self.form = shape, form
        self.layers = nn.ModuleList(Experts(shape) for _ in range(shape.layers))
        self.mix = nn.ModuleList(
            nn.Linear(shape.hidden, shape.hidden, bias=False, dtype=shape.dtype) for _ in self.layers
        )

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for number, (experts, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            read = experts.batched if self.form == "batched" else experts.grouped
            x = x + read(F.rms_norm(mix(x), (self.shape.hidden,)), ids[number])
        return x


def routed(shape: Shape, seed: int = 0) -> Routed:
    model = Routed(shape).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def exported(model: Routed, form: str, tokens: int, *, most_tokens: int = 0) -> torch.export.ExportedProgram:
    """With `most_tokens` their number is left open."""
    import transformers.integrations.moe  # noqa: F401  registers the op

    shape, model.form = model.shape, form
    device = next(model.parameters()).device
    x = torch.zeros(tokens, shape.hidden, dtype=shape.dtype, device=device)
    ids = torch.zeros(shape.layers, tokens, shape.top, dtype=torch.int64, device=device)
    length = torch.export.Dim("length", min=2, max=most_tokens) if most_tokens else None
    dynamic = ({0: length}, {1: length}) if length is not None else None
    with torch.no_grad():
        return torch.export.export(model, (x, ids), dynamic_shapes=dynamic, strict=False)


def compiled(model: Routed, path: Path, device: str = "cpu", *, prompt: int = 0) -> Path:
    """Method "decode" for one token, and with `prompt` one for up to so many, which reads them in groups."""
    programs = {"decode": exported(model, "batched", 1)}
    if prompt:
        programs["prefill"] = exported(model, "grouped", min(prompt, 7), most_tokens=prompt)
    offloaded = {name: penstock.apply_weight_offload(program) for name, program in programs.items()}
    penstock.compile(offloaded, path, device=device)
    return path


def routing(shape: Shape, tokens: int, *, stay: float, seed: int, drift: int = 0) -> Tensor:
    """ids [tokens, layers, top]: a token keeps each expert of the one before with probability `stay`, and else draws by
    Zipf's law. With `drift` two experts change places after so many tokens."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(shape.experts)]
    found = []
    for _ in range(shape.layers):
        order = list(range(shape.experts))
        draw.shuffle(order)
        last: list[int] = []
        rows = []
        for token in range(tokens):
            if drift and token and token % drift == 0:
                one, other = draw.sample(range(shape.experts), 2)
                order[one], order[other] = order[other], order[one]
            last = [rank for rank in last if draw.random() < stay]
            while len(last) < shape.top:
                (rank,) = draw.choices(range(shape.experts), weights)
                if rank not in last:
                    last.append(rank)
            rows.append([order[rank] for rank in last])
        found.append(rows)
    return torch.tensor(found).transpose(0, 1).contiguous()
