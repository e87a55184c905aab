"""The compiled programs of the GPU tests. `python -m tests.gpu.programs NAME FOLDER` compiles one.

A compile takes more than a minute, nearly all of it on one core: the tests start them side by side.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from examples import decoder
from torch import nn

import penstock

DECODER = decoder.DecoderConfig(
    hidden=1024, ff=2816, layers=4, heads=8, kv_heads=4, vocab=8192, max_len=64, dtype=torch.bfloat16
)


@torch.library.custom_op("penstock_tests::spin", mutates_args=(), device_types="cuda")
def spin(x: torch.Tensor, cycles: int) -> torch.Tensor:
    """A slow kernel: what follows it on the stream waits."""
    torch.cuda._sleep(cycles)
    return x.clone()


@spin.register_fake
def _(x: torch.Tensor, cycles: int) -> torch.Tensor:
    return torch.empty_like(x)


class SlowChain(nn.Module):
    """Weights of different sizes with slow kernels between them, long enough for copies to run far ahead or behind."""

    SIZES = (2048, 1024, 3072, 2048, 512, 2048)

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.SIZES, (*self.SIZES[1:], self.SIZES[0]), strict=True)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=torch.bfloat16) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number % 2:
                x = torch.ops.penstock_tests.spin(x, 2_000_000)
        return x


class Accumulator(nn.Module):
    """Takes any number of rows, and adds what it computes to one of its inputs."""

    WIDTH = 2048

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, dtype=torch.bfloat16) for _ in range(6))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        total.add_(x.sum(0))
        return x, first + x


class Brancher(nn.Module):
    """Which weight it reads depends on a value, which the host has to wait for."""

    WIDTH = 2048

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(self.WIDTH, self.WIDTH, dtype=torch.bfloat16)
        self.right = nn.Linear(self.WIDTH, self.WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.left(y).tanh(), lambda y: self.right(y).cos(), (x,))


class Routed(nn.Module):
    """A tied embedding table, and a layer of experts of which every token takes one."""

    VOCABULARY, WIDTH, EXPERTS = 32_000, 1024, 16

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.VOCABULARY, self.WIDTH, dtype=torch.bfloat16)
        self.router = nn.Linear(self.WIDTH, self.EXPERTS, dtype=torch.bfloat16)
        self.experts = nn.Parameter(torch.randn(self.EXPERTS, self.WIDTH, self.WIDTH, dtype=torch.bfloat16) / 32)
        self.dense = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, dtype=torch.bfloat16) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        h = h + torch.bmm(h[:, None], self.experts[self.router(h).argmax(-1)])[:, 0]
        for layer in self.dense:
            h = h + torch.tanh(layer(h))
        return h @ self.table.weight.t()


def compile_program(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    if name == "decoder":
        programs = {
            method: penstock.apply_weight_offload(decoder.export(case))
            for method, case in decoder.methods(DECODER).items()
        }
        penstock.compile(programs, folder / "model.pt2", device="cuda")
    elif name == "accumulator":
        rows = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "total": None}
        width = Accumulator.WIDTH
        example = torch.zeros(4, width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
        ep = torch.export.export(Accumulator().eval().requires_grad_(False), example, dynamic_shapes=rows)
        penstock.compile(penstock.apply_weight_offload(ep), folder / "model.pt2", device="cuda")
    elif name == "brancher":
        ep = torch.export.export(
            Brancher().eval().requires_grad_(False), (torch.zeros(4, Brancher.WIDTH, dtype=torch.bfloat16),)
        )
        penstock.compile(penstock.apply_weight_offload(ep), folder / "model.pt2", device="cuda")
    elif name == "routed":
        ep = torch.export.export(Routed().eval().requires_grad_(False), (torch.arange(4),))
        penstock.compile(penstock.apply_weight_offload(ep), folder / "model.pt2", device="cuda")
    else:
        model = SlowChain().eval().requires_grad_(False)
        # Exported on meta: the op has no kernel on the CPU.
        example = torch.zeros(4, SlowChain.SIZES[0], dtype=torch.bfloat16)
        ep = torch.export.export(model, (example,))
        penstock.compile(penstock.apply_weight_offload(ep), folder / "model.pt2", device="cuda")


def compile_all(folder: Path) -> dict[str, Path]:
    """Side by side, each in a process of its own; what is there already is used."""
    names = ("decoder", "slow_chain", "accumulator", "brancher", "routed")
    paths = {name: folder / name / "model.pt2" for name in names}
    children = [
        subprocess.Popen([sys.executable, "-m", "tests.gpu.programs", name, str(path.parent)])
        for name, path in paths.items()
        if not path.exists()
    ]
    for child in children:
        assert child.wait() == 0
    return paths


if __name__ == "__main__":
    compile_program(sys.argv[1], Path(sys.argv[2]))
