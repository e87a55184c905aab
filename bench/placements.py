"""The ways of reaching a weight side by side, near the floor of a model with a large vocabulary: copied, read in place,
on both sides, and whichever suits each.

    python -m bench.placements --out FOLDER [--layers 8] [--above-floor 0,256MiB,1GiB] [--small]

Blocks of Llama-3-8B's shape between an embedding and an output projection of 128,256 words, bf16, one token. A budget
is the floor of placement="stream" and so much above it. "auto" was calibrated with copies and with reads in place. The
program is compiled twice: with the library's products, and with linears that may be split, whose last bits differ.
Exits with 1 when an output is not that of all weights resident: to the bit for the library's, nearly for the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock
from bench.programs import Recipe, prepare
from bench.suite.measure import WARM_UP_RUNS, measure_link, synchronize, time_back_to_back
from bench.suite.model import Block, llama3_8b, small
from bench.suite.prepare import environment
from penstock.budget import format_bytes, parse_bytes

WORDS, SMALL_WORDS = 128_256, 4_096
CALIBRATING_RUNS = 5
EVERYTHING = "1024TiB"
ROUND_S = 0.25
TOLERANCE = 0.05
# Mode, and whether the program's linears may be split.
WAYS = (("stream", False), ("in-place", False), ("auto", False), ("split", True), ("auto", True))


class LanguageModel(nn.Module):
    def __init__(self, layers: int, words: int) -> None:
        super().__init__()
        shape = llama3_8b(layers) if words == WORDS else small(layers)
        self.embedding = nn.Embedding(words, shape.hidden)
        self.layers = nn.ModuleList([Block(shape) for _ in range(layers)])
        self.head = nn.Linear(shape.hidden, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def example(layers: int, words: int) -> tuple[Tensor, ...]:
    return (torch.zeros(1, 1, dtype=torch.int64),)


@dataclass(frozen=True)
class Point:
    way: str
    budget_bytes: int
    seconds: float
    bytes_streamed: int
    # Of weights that are read where they lie, wholly or but for a head; a table counts in full.
    in_place_bytes: int
    relative_error: float
    identical: bool


def main() -> int:
    options = _parser().parse_args()
    words = SMALL_WORDS if options.small else WORDS
    hidden = (small(options.layers) if options.small else llama3_8b(options.layers)).hidden
    recipe = Recipe(LanguageModel, (options.layers, words), example, None, hidden)
    library, split = prepare(options.out, recipe, options.device, (False, True))
    link = max(measure_link(options.device).values())
    ids = torch.full((1, 1), 17, dtype=torch.int64, device=options.device)
    with torch.no_grad():
        with penstock.Module(library, EVERYTHING, placement="stream", device=options.device) as module:
            wanted, seconds = module(ids).clone(), _time(module, ids, options.device)
            floor_bytes, weight_bytes = module.floor_bytes, module.weight_bytes
        print(
            f"{weight_bytes / 1e9:.2f} GB, link {link / 1e9:.1f} GB/s, all resident {seconds * 1e3:.2f} ms\n",
            flush=True,
        )
        points = [
            _measure(
                options.device, split if may_split else library, placement, may_split, floor_bytes + above, ids, wanted
            )
            for above in options.above_floor
            for placement, may_split in WAYS
        ]
    _print(points)
    stored = {
        "environment": environment(options.device),
        "link_bytes_per_s": link,
        "floor_bytes": floor_bytes,
        "resident_s": seconds,
        "points": [dataclasses.asdict(p) for p in points],
    }
    (options.out / "placements.json").write_text(json.dumps(stored, indent=1))
    wrong = [p for p in points if p.relative_error > TOLERANCE or not (p.identical or "split" in p.way)]
    return int(bool(wrong))


def _measure(
    device: str, path: Path, placement: str, may_split: bool, budget_bytes: int, ids: Tensor, wanted: Tensor
) -> Point:
    with penstock.Module(path, budget_bytes, placement=placement, device=device) as module:
        if placement == "auto":
            _calibrate(module, ids)
        seconds = _time(module, ids, device)
        output, plan = module(ids), module.plan
        assert plan is not None
        return Point(
            way=f"{placement}, with split" if may_split and placement == "auto" else placement,
            budget_bytes=budget_bytes,
            seconds=seconds,
            bytes_streamed=module.last_run.bytes_streamed,
            in_place_bytes=sum(p.in_place_bytes for p in plan.method(module.methods[0]).placements),
            relative_error=float((output - wanted).float().norm() / wanted.float().norm()),
            identical=torch.equal(output, wanted),
        )


def _calibrate(module: penstock.Module, ids: Tensor) -> None:
    for _ in range(WARM_UP_RUNS):
        module(ids)
    if not module.last_run.copies:
        return  # everything that is copied at all fits: there is nothing to plan
    with module.calibrate():
        for _ in range(CALIBRATING_RUNS):
            module(ids)
    with module.calibrate(in_place=True):
        for _ in range(CALIBRATING_RUNS):
            module(ids)


def _time(module: penstock.Module, ids: Tensor, device: str) -> float:
    for _ in range(WARM_UP_RUNS):
        module(ids)
    synchronize(device)
    return time_back_to_back(lambda: module(ids), device, ROUND_S).median_s


def _print(points: list[Point]) -> None:
    print("| budget | placement | time | streamed | read in place | beside the best pure placement | output |")
    print("|---|---|---|---|---|---|---|")
    for point in points:
        pure = [p.seconds for p in points if p.budget_bytes == point.budget_bytes and not p.way.startswith("auto")]
        beside = f"{point.seconds / min(pure):.3f}" if point.way.startswith("auto") else ""
        output = "identical" if point.identical else f"relative error {point.relative_error:.1e}"
        print(
            f"| {format_bytes(point.budget_bytes)} | {point.way} | {point.seconds * 1e3:.2f} ms | "
            f"{point.bytes_streamed / 1e9:.2f} GB | {point.in_place_bytes / 1e9:.2f} GB | {beside} | {output} |"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--above-floor", type=lambda t: [parse_bytes(b) for b in t.split(",")], default=[0, 256 << 20, 1 << 30]
    )
    parser.add_argument("--small", action="store_true", help="a model of kilobytes, for machines without a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
