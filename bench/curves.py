"""Time of a pass against the part of the weights that lies on the host: read from both sides at once, copied ahead, and
read in place by the library, in one process on the same weights.

    python -m bench.curves --out FOLDER [--layers 4] [--batches 8,512] [--ratios 0,10,25,50,75,90] [--small]

Layers of OPT-30B's shape (hidden 7168, feed-forward 28672, biases, bf16), one token of each sequence of the batch.
Attention is left out but for its projections: each token takes its own value. Caches have a benchmark of their own,
bench.kv_attention. "Bound" is the longer of the all-resident time and the host's bytes over the link. Outputs are
compared with the library's, everything resident; where our kernel multiplies, the last bits differ from those.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from bench.programs import Recipe, prepare
from bench.suite.measure import WARM_UP_RUNS, measure_link, synchronize, time_back_to_back
from bench.suite.prepare import environment

HIDDEN, FF = 7168, 28672
SMALL_HIDDEN, SMALL_FF = 256, 512
MOST_BATCH = 4096
EVERYTHING = "1024TiB"
ROUND_S = 0.15
# Way, placement, and whether the program's linears may be split.
WAYS = (("split", "split", True), ("copied ahead", "stream", False), ("read in place", "in-place", False))


class Layer(nn.Module):
    def __init__(self, hidden: int, ff: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, ff), nn.Linear(ff, hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_norm(x)
        # A token that attends to itself alone takes its own value; q and k must not be dropped for that.
        x = x + self.o(self.v(h) * torch.sigmoid(self.q(h) * self.k(h)))
        added: Tensor = self.down(F.relu(self.up(self.mlp_norm(x))))
        return x + added


class Layers(nn.Module):
    def __init__(self, layers: int, hidden: int, ff: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(hidden, ff) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def example(layers: int, hidden: int, ff: int) -> tuple[Tensor, ...]:
    return (torch.empty(8, hidden, dtype=torch.bfloat16),)


@dataclass(frozen=True)
class Point:
    batch: int
    ratio_percent: int
    way: str
    budget_bytes: int
    # None: this way has a floor above the budget.
    seconds: float | None
    bound_s: float
    relative_error: float | None


def main() -> int:
    options = _parser().parse_args()
    hidden, ff = (SMALL_HIDDEN, SMALL_FF) if options.small else (HIDDEN, FF)
    recipe = Recipe(Layers, (options.layers, hidden, ff), example, (2, MOST_BATCH), hidden)
    library, split = prepare(options.out, recipe, options.device, (False, True))
    link = max(measure_link(options.device).values())
    points: list[Point] = []
    with torch.no_grad():
        for batch in options.batches:
            x = torch.randn(batch, hidden, generator=torch.Generator().manual_seed(batch))
            x = x.to(torch.bfloat16).to(options.device)
            resident_s, wanted = _resident(library, x, options.device)
            print(f"\nbatch {batch}: all resident {resident_s * 1e3:.2f} ms, link {link / 1e9:.1f} GB/s\n")
            found = [
                point
                for way, placement, may_split in WAYS
                for point in _curve(
                    options, split if may_split else library, way, placement, x, wanted, resident_s, link
                )
            ]
            _print(found, options.ratios)
            points += found
    stored = {
        "environment": environment(options.device),
        "link_bytes_per_s": link,
        "points": [dataclasses.asdict(p) for p in points],
    }
    (options.out / "curves.json").write_text(json.dumps(stored, indent=1))
    return int(any(point.relative_error is not None and point.relative_error > 0.05 for point in points))


def _resident(path: Path, x: Tensor, device: str) -> tuple[float, Tensor]:
    with penstock.Module(path, EVERYTHING, placement="stream", device=device) as module:
        return _time(module, x, device), module(x).clone()


def _curve(
    options: argparse.Namespace,
    path: Path,
    way: str,
    placement: str,
    x: Tensor,
    wanted: Tensor,
    resident_s: float,
    link: float,
) -> list[Point]:
    points = []
    with penstock.Module(path, EVERYTHING, placement=placement, device=options.device) as module:
        for ratio in options.ratios:
            host_bytes = module.weight_bytes * ratio // 100
            budget_bytes = module.weight_bytes - host_bytes if ratio else module.budget_bytes
            seconds = error = None
            if budget_bytes >= module.floor_bytes:
                module.set_budget(budget_bytes)
                seconds = _time(module, x, options.device)
                error = float((module(x) - wanted).float().norm() / wanted.float().norm())
            bound_s = max(resident_s, host_bytes / link)
            points.append(Point(x.shape[0], ratio, way, budget_bytes, seconds, bound_s, error))
    return points


def _time(module: penstock.Module, x: Tensor, device: str) -> float:
    for _ in range(WARM_UP_RUNS):
        module(x)
    synchronize(device)
    return time_back_to_back(lambda: module(x), device, ROUND_S).median_s


def _print(points: list[Point], ratios: list[int]) -> None:
    names = [way for way, _, _ in WAYS]
    print("| on the host | bound | " + " | ".join(names) + " |")
    print("|---" * (2 + len(names)) + "|")
    for ratio in ratios:
        row = {point.way: point for point in points if point.ratio_percent == ratio}
        cells = [_cell(row[name]) for name in names]
        print(f"| {ratio}% | {row[names[0]].bound_s * 1e3:.2f} ms | " + " | ".join(cells) + " |")


def _cell(point: Point) -> str:
    if point.seconds is None:
        return "below its floor"
    return f"{point.seconds * 1e3:.2f} ms ({point.seconds / point.bound_s:.2f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=_numbers, default=[8, 512])
    parser.add_argument("--ratios", type=_numbers, default=[0, 10, 25, 50, 75, 90])
    parser.add_argument("--small", action="store_true", help="layers of kilobytes, for machines without a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
