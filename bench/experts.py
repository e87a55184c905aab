"""Experts in slots: time a token, by how many are held, beside the bound and beside everything read in place.

    python -m bench.experts --out FOLDER [--layers 6] [--held 10,20,38] [--stay 0.6,0.3] [--tokens 250] [--int4]

Layers of Qwen3-30B-A3B's experts (128, 8 of them a token, 2,048 x 768, bf16; with --int4 in 4 bits with a scale for
each 64), and nothing else: one token, as a CUDA graph. The routing is made, since no trained weights are at hand: a
token keeps each expert of the one before with probability `stay`, and else draws by Zipf's law
(tests.experts.routed.routing); the first hundred tokens do not count. "Held" is the part of the experts that have
slots. The bound is what missed over the link at 50 GB/s, and everything resident. Exits with 1 when an output is not,
to the bit, that of everything resident.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.experts.routed import Shape as RoutingShape
from tests.experts.routed import routing
from torch import Tensor, nn

import penstock
from bench.suite.measure import measure_link, synchronize
from bench.suite.prepare import environment

EVERYTHING = "1024TiB"
WARM_TOKENS = 100
# What kernels read over the link, which experts come by (docs/direct.md).
READ_BYTES_PER_S = 50e9
GROUP = 64


@dataclass(frozen=True)
class Shape:
    layers: int
    experts: int = 128
    top: int = 8
    hidden: int = 2048
    inner: int = 768
    int4: bool = False


@dataclass(frozen=True)
class Row:
    way: str
    stay: float
    held_percent: float
    slots: int
    budget_bytes: int
    hit_rate: float | None
    miss_bytes_a_token: float
    seconds_a_token: float
    bound_s: float | None
    equal: bool


class Experts(nn.Module):
    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.shape = shape
        sizes = {"gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
        for name, (rows, columns) in sizes.items():
            if shape.int4:
                packed = torch.empty(shape.experts, rows, columns // 2, dtype=torch.uint8, device=device)
                scales = torch.empty(shape.experts, rows, columns // GROUP, dtype=torch.bfloat16, device=device)
                self.register_buffer(name, packed)
                self.register_buffer(f"{name}_scales", scales)
            else:
                stacked = torch.empty(shape.experts, rows, columns, dtype=torch.bfloat16, device=device)
                self.register_buffer(name, stacked)

    def _matrices(self, name: str, ids: Tensor) -> Tensor:
        taken = getattr(self, name)[ids]
        if not self.shape.int4:
            return taken
        scales = getattr(self, f"{name}_scales")[ids]
        halves = torch.stack((taken & 15, taken >> 4), -1).flatten(-2).to(torch.bfloat16) - 8
        return (halves.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)).flatten(-2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        up = torch.bmm(self._matrices("gate_up", ids), x.expand(ids.shape[0], -1).unsqueeze(-1)).squeeze(-1)
        gate, linear = up.chunk(2, -1)
        out = torch.bmm(self._matrices("down", ids), (F.silu(gate) * linear).unsqueeze(-1)).squeeze(-1)
        return out.sum(0, keepdim=True)


class Model(nn.Module):
    def __init__(self, shape: Shape, device: str = "meta") -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Experts(shape, device) for _ in range(shape.layers))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """ids [layers, top]"""
        for number, layer in enumerate(self.layers):
            x = x + layer(F.rms_norm(x, (self.shape.hidden,)), ids[number])
        return x


def values(shape: Shape, device: str) -> dict[str, Tensor]:
    """One layer's for all of them, turned by its number: a file takes no more to make than its bytes to write."""
    generator = torch.Generator(device).manual_seed(0)
    found: dict[str, Tensor] = {}
    made = Experts(shape, device)
    for buffer in made.buffers():
        if buffer.dtype is torch.uint8:
            buffer.random_(0, 256, generator=generator)
        else:
            buffer.normal_(0, 0.02, generator=generator)
    for number in range(shape.layers):
        for name, buffer in made.named_buffers():
            found[f"layers.{number}.{name}"] = buffer
    return found


class Turned(dict[str, Tensor]):
    """Values that are turned and brought to the host when they are asked for."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        super().__init__(found)

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).roll(int(name.split(".")[1]), 0).cpu()


def prepare(shape: Shape, folder: Path, device: str) -> Path:
    path = folder / f"experts-{shape.layers}{'-int4' if shape.int4 else ''}.pt2"
    if path.exists():
        return path
    model = Model(shape)
    x = torch.zeros(1, shape.hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.zeros(shape.layers, shape.top, dtype=torch.int64, device="meta")
    with torch.no_grad():
        program = penstock.apply_weight_offload(torch.export.export(model, (x, ids), strict=False))
    penstock.compile(program, path, device=device, weights=Turned(values(shape, device)))
    return path


def played(module: penstock.Module, x: Tensor, ids: Tensor, device: str) -> tuple[float, Tensor, float | None, float]:
    """Seconds a token, the last output, the hit rate, and bytes that missed a token."""
    for token in range(WARM_TOKENS):
        module(x, ids[token])
    before = module.stats()
    synchronize(device)
    begin = time.perf_counter()
    for token in range(WARM_TOKENS, len(ids)):
        out = module(x, ids[token])
    synchronize(device)
    seconds = (time.perf_counter() - begin) / (len(ids) - WARM_TOKENS)
    after = module.stats()
    hits, misses = after.expert_hits - before.expert_hits, after.expert_misses - before.expert_misses
    rate = hits / (hits + misses) if hits + misses else None
    return seconds, out, rate, (after.expert_bytes - before.expert_bytes) / (len(ids) - WARM_TOKENS)


def measure(shape: Shape, path: Path, given: argparse.Namespace, device: str) -> list[Row]:
    rows: list[Row] = []
    graph = {"cuda_graph": True} if device == "cuda" else {}
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    tokens = WARM_TOKENS + given.tokens
    made = RoutingShape(layers=shape.layers, experts=shape.experts, top=shape.top)
    for stay in given.stay:
        ids = routing(made, tokens, stay=stay, seed=0).to(device)
        with penstock.Module(path, EVERYTHING, **graph) as module:
            full_bytes = module.budget_bytes
            resident_s, wanted, _, _ = played(module, x, ids, device)
        rows.append(Row("resident", stay, 100, shape.experts, full_bytes, None, 0, resident_s, None, True))
        print(rows[-1], flush=True)
        for held in [0.0, *given.held]:
            budget = int(full_bytes * held / 100)
            with penstock.Module(path, budget, placement="auto" if held else "in-place", **graph) as module:
                seconds, out, rate, missed = played(module, x, ids, device)
                plan = module.plan
                slots = plan.banks[0].slots if plan is not None and plan.banks else 0
                spent = module.device_memory()[1]
            if not held:
                missed = full_bytes * shape.top / shape.experts
            bound = missed / READ_BYTES_PER_S + resident_s
            way = "slots" if held else "in place"
            row = Row(way, stay, held, slots, spent, rate, missed, seconds, bound, torch.equal(out, wanted))
            rows.append(row)
            print(f"{row} {seconds / bound:.3f} of the bound", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Callable[[str], list[float]] = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--held", type=numbers, default=[10.0, 20.0, 38.0])
    parser.add_argument("--stay", type=numbers, default=[0.6, 0.3])
    parser.add_argument("--tokens", type=int, default=250, help="0: only make the program, which --work keeps")
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--small", action="store_true", help="a model that a test can run")
    parser.add_argument("--work", type=Path, help="where the program is made; kept")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(given.layers, int4=given.int4)
    if given.small:
        shape = Shape(2, 16, 2, 128, 64, given.int4)
    given.out.mkdir(parents=True, exist_ok=True)
    work = given.work or given.out
    work.mkdir(parents=True, exist_ok=True)
    path = prepare(shape, work, device)
    rows = measure(shape, path, given, device) if given.tokens else []
    link = measure_link(device) if device == "cuda" else None
    table = {"shape": asdict(shape), "link_bytes_per_s": link, "rows": [asdict(row) for row in rows]}
    (given.out / "experts.json").write_text(json.dumps({**environment(device), **table}, indent=1))
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
