"""What a soak runs: compiled programs of every kind, their calls, and how each may be loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu import programs as gpu_programs
from tests.harness import compiled, offloaded
from tests.runtime.modules import CHAIN_WIDTH, COMPILERS, DECODER, GATE_WIDTH, STAGING_CAP_BYTES, random_input

Call = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Kind:
    """A program by its name. `calls` are few, so that what they give is computed once and compared often."""

    name: str
    compile: Callable[[Path], None]
    calls: tuple[Call, ...]
    # A method without state may be called by two threads at once, and by one after the other in any order.
    has_state: bool = False
    # For every load of it, the reference's included.
    options: Mapping[str, Any] = field(default_factory=dict)
    placements: tuple[str, ...] = ("auto", "stream")
    capturable: bool = True
    # Compiled with split_linear=True, whose kernel wants a plan and weights in place.
    is_split: bool = False


# ---- on the CPU


class Routed(nn.Module):
    """A tied table that is gathered from, and a layer of experts of which every token takes one."""

    VOCABULARY, WIDTH, EXPERTS = 400, 64, 6

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.router = nn.Linear(self.WIDTH, self.EXPERTS)
        self.experts = nn.Parameter(torch.randn(self.EXPERTS, self.WIDTH, self.WIDTH) / 8)
        self.dense = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        h = h + torch.bmm(h[:, None], self.experts[self.router(h).argmax(-1)])[:, 0]
        for layer in self.dense:
            h = h + torch.tanh(layer(h))
        return h @ self.table.weight.t()


class Halves(nn.Module):
    """Linears whose rows may lie in two places."""

    WIDTH = 128

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, dtype=torch.bfloat16) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def _compile_routed(folder: Path) -> None:
    compiled(folder, offloaded(_seeded(Routed), (torch.arange(4),)))


def _compile_halves(folder: Path) -> None:
    example = torch.ones(3, Halves.WIDTH, dtype=torch.bfloat16)
    compiled(folder, offloaded(_seeded(Halves), (example,)), split_linear=True)


def _prefill(length: int, device: str, vocabulary: int) -> Call:
    tokens = (torch.arange(length) * 7 % vocabulary)[None].clone()
    return "prefill", (tokens.to(device), torch.arange(length, device=device))


def _decode(token: int, position: int, device: str) -> Call:
    return "decode", (torch.tensor([[token]], device=device), torch.tensor([position], device=device))


def _cpu_kinds() -> tuple[Kind, ...]:
    def prefill(length: int) -> Call:
        return _prefill(length, "cpu", DECODER.vocab)

    halves = [random_input(3, Halves.WIDTH, seed=seed).to(torch.bfloat16) for seed in range(4)]
    return (
        Kind(
            "chain",
            COMPILERS["chain"],
            tuple(("forward", (random_input(rows, CHAIN_WIDTH, seed=rows),)) for rows in (1, 2, 3, 7, 17)),
            placements=("auto", "stream", "in-place"),
        ),
        Kind(
            "gate",
            COMPILERS["gate"],
            tuple(("forward", (sign * random_input(2, GATE_WIDTH).abs(),)) for sign in (1.0, -1.0)),
            has_state=True,
        ),
        Kind(
            "decoder",
            COMPILERS["decoder"],
            (prefill(2), prefill(8), *(_decode(11 * at, at, "cpu") for at in (2, 3, 8))),
            has_state=True,
            placements=("auto", "stream", "in-place"),
        ),
        Kind(
            "routed",
            _compile_routed,
            tuple(("forward", ((torch.arange(4) * step + step) % Routed.VOCABULARY,)) for step in (1, 37, 99)),
        ),
        Kind(
            "halves",
            _compile_halves,
            tuple(("forward", (x,)) for x in halves),
            placements=("auto", "split"),
            is_split=True,
        ),
    )


# ---- on a GPU: weights of several pages of 2 MiB


def _gpu_kinds() -> tuple[Kind, ...]:
    def x(rows: int, width: int, sign: float = 1.0) -> Tensor:
        return (sign * random_input(rows, width, seed=rows).abs()).to("cuda", torch.bfloat16)

    def made(name: str) -> Callable[[Path], None]:
        return lambda folder: gpu_programs.compile_program(name, folder)

    config = gpu_programs.DECODER
    calls: list[Call] = [_prefill(length, "cuda", config.vocab) for length in (2, 8)]
    calls += [_decode(11 * at, at, "cuda") for at in (2, 3, 8)]
    width = gpu_programs.Brancher.WIDTH
    return (
        Kind("decoder", made("decoder"), tuple(calls), has_state=True),
        Kind(
            "brancher",
            made("brancher"),
            tuple(("forward", (x(4, width, sign),)) for sign in (1.0, -1.0)),
            capturable=False,  # the host waits for a value
        ),
        Kind("routed", made("routed"), tuple(("forward", (torch.arange(4).cuda() * n + n,)) for n in (1, 37, 999))),
    )


def kinds(device: str) -> tuple[Kind, ...]:
    return _cpu_kinds() if device == "cpu" else _gpu_kinds()


def compile_missing(device: str, folder: Path) -> None:
    """One after the other on the CPU, side by side for a GPU, where a compile takes a minute; what is there is used."""
    names = [kind.name for kind in kinds(device) if not (folder / kind.name / "model.pt2").exists()]
    children = []
    for name in names:
        children.append(
            subprocess.Popen([sys.executable, "-m", "tests.soak.programs", device, name, str(folder / name)])
        )
        if device == "cpu":
            children[-1].wait()
    failed = [name for name, child in zip(names, children, strict=True) if child.wait()]
    if failed:
        raise SystemExit(f"these programs did not compile: {', '.join(failed)}")


def load_options(kind: Kind, device: str, draw: Random) -> dict[str, Any]:
    """How to load it this time."""
    options: dict[str, Any] = dict(kind.options)
    split = kind.is_split
    match "planned" if split else draw.choices(("planned", "staged", "lru"), (6, 2, 2))[0]:
        case "staged":
            options["host_memory"] = STAGING_CAP_BYTES if device == "cpu" else 64 << 20
        case "lru":
            options["placement"] = "lru"
        case _:
            options["placement"] = draw.choice(kind.placements)
            if device == "cuda" and kind.capturable and draw.random() < 0.5:
                options["cuda_graph"] = True
    if options.get("placement") != "lru" and "placement" not in kind.options and draw.random() < 0.15:
        options["calibration"] = "first-runs"
    return options


if __name__ == "__main__":
    device, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    next(kind for kind in kinds(device) if kind.name == name).compile(folder)
