"""A decoding step of layers with a KV cache, in one total of device memory: divided between weights and positions as
the planner does, and with the same part of each.

    python -m bench.weights_and_cache --out FOLDER [--layers 4] [--batch 8] [--positions 2048] [--fill 0.5]
                                      [--ratios 0,10,25,50,75,90 | --totals 16GiB,24GiB] [--small]

Layers of OPT-30B's shape (hidden 7168, 56 heads, feed-forward 28672, biases, bf16), one token for each sequence, with
linears that may be split; of the cache so much is filled. A ratio is the part of weights and cache that lies on the
host; --totals grants so much device memory instead, whatever part that leaves there. "Bound" is the longer of the
all-resident time and what is read on the host over the link: at best that is what is left of it beside the positions
that are not filled. "Of both": all bytes that are read, over the link and out of device memory at once. Exits with 1
when an output is not, to the bit, that of everything resident.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from bench.kv_attention import memory_bytes_per_s
from bench.suite.measure import WARM_UP_RUNS, measure_link, synchronize, time_back_to_back
from bench.suite.prepare import environment
from penstock.budget import parse_bytes
from penstock.errors import BelowFloorError
from penstock.kv import HostKVCache
from penstock.plan.cache_share import CacheGroup, Division, WeightsRange, divide
from penstock.runtime import device_memory

HIDDEN, HEADS, FF = 7168, 56, 28672
SMALL_HIDDEN, SMALL_HEADS, SMALL_FF = 256, 4, 512
HEAD_DIM, SMALL_HEAD_DIM = 128, 64
EVERYTHING = "1024TiB"
CALIBRATING_RUNS = 5
ROUND_S = 0.15

Divide = Callable[[int, WeightsRange, Sequence[CacheGroup]], Division]


def uniform(room_bytes: int, weights: WeightsRange, groups: Sequence[CacheGroup]) -> Division:
    """The same part of everything; what whole blocks leave, and what weights need at least, is theirs."""
    part = min(1.0, room_bytes / (weights.full_bytes + sum(group.nbytes for group in groups)))
    positions, left_bytes = [], room_bytes
    for group in groups:
        most_bytes = min(int(part * group.nbytes), left_bytes - weights.floor_bytes)
        positions.append(group.positions_within(max(0, most_bytes)))
        left_bytes -= positions[-1] * group.position_bytes
    return Division(left_bytes, tuple(positions))


@dataclass(frozen=True)
class Way:
    name: str
    placement: str
    divide: Divide


WAYS = (
    Way("planned", "auto", divide),
    Way("planned, split", "split", divide),
    Way("uniform, split", "split", uniform),
    Way("copied ahead", "stream", divide),
    Way("uniform, copied", "stream", uniform),
    Way("read in place", "in-place", divide),
)


@dataclass(frozen=True)
class Point:
    host_percent: float
    way: str
    total_bytes: int
    # None: below this way's smallest total.
    seconds: float | None
    bound_s: float
    weights_budget_bytes: int | None = None
    device_positions: int | None = None
    bytes_streamed: int | None = None
    equal: bool | None = None


class Layers(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, head_dim: int, ff: int, cache: HostKVCache) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.cache = cache
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(2 * layers)])
        self.qkv = nn.ModuleList([nn.Linear(hidden, heads * head_dim) for _ in range(3 * layers)])
        self.o = nn.ModuleList([nn.Linear(heads * head_dim, hidden) for _ in range(layers)])
        self.up = nn.ModuleList([nn.Linear(hidden, ff) for _ in range(layers)])
        self.down = nn.ModuleList([nn.Linear(ff, hidden) for _ in range(layers)])

    def forward(self, x: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        for layer, o in enumerate(self.o):
            h = self.norms[2 * layer](x)
            q, k, v = (
                self.qkv[3 * layer + which](h).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
                for which in range(3)
            )
            y = self.cache(layer, q, k, v, starts, counts)
            x = x + o(y.transpose(1, 2).reshape(batch, tokens, -1))
            x = x + self.down[layer](F.relu(self.up[layer](self.norms[2 * layer + 1](x))))
        return x


def main() -> int:
    options = _parser().parse_args()
    path = _compiled(options)
    program = penstock.read_program(path)
    inputs = _inputs(options)
    link = max(measure_link(options.device).values())
    on_cuda = options.device.startswith("cuda")
    granted = device_memory.grant(0, program, torch.device(options.device), cuda_graph=False)
    cache_bytes = sum(near.nbytes + far.nbytes for near, far in program.caches)
    read_bytes = program.weight_bytes + int(options.fill * cache_bytes)
    with penstock.Module(path, device_memory=EVERYTHING, device=options.device) as module:
        _fill(module, options)
        wanted, resident_s = _timed(module, inputs, options.device)
        full_bytes = module.full_bytes
    of_both_s = read_bytes / (link + memory_bytes_per_s(ROUND_S)) if on_cuda else None
    print(
        f"weights {program.weight_bytes / 1e9:.2f} GB, cache {cache_bytes / 1e9:.2f} GB, {options.fill:.0%} filled; "
        f"all resident {resident_s * 1e3:.2f} ms, link {link / 1e9:.1f} GB/s"
        + (f", of both {of_both_s * 1e3:.2f} ms" if of_both_s else "")
    )
    # In whole pages.
    all_bytes = full_bytes + cache_bytes
    measured = {
        "environment": environment(options.device),
        "options": {name: getattr(options, name) for name in ("layers", "batch", "positions", "fill")},
        "weight_bytes": program.weight_bytes,
        "cache_bytes": cache_bytes,
        "link_bytes_per_s": link,
        "resident_s": resident_s,
        "of_both_s": of_both_s,
    }
    points = []
    for total_bytes in _totals(options, all_bytes, granted.beside_weights_bytes):
        host_bytes = max(0, granted.beside_weights_bytes + all_bytes - total_bytes)
        far_bytes = max(0, host_bytes - (cache_bytes - int(options.fill * cache_bytes)))
        bound_s = max(resident_s, far_bytes / link)
        host_percent = 100 * host_bytes / all_bytes
        row = [
            _point(options, path, way, host_percent, total_bytes, bound_s, inputs, wanted)
            for way in WAYS
            if way.name in options.ways
        ]
        points += row
        cells = " | ".join(_cell(point, options.batch) for point in row)
        print(
            f"| {total_bytes / 2**30:.1f} GiB, {host_percent:.0f}% far | {bound_s * 1e3:.2f} ms | {cells} |", flush=True
        )
        # Whatever comes after it: a point takes long.
        stored = {**measured, "points": [dataclasses.asdict(point) for point in points]}
        (options.out / "weights-and-cache.json").write_text(json.dumps(stored, indent=1))
    return int(any(point.equal is False for point in points))


def _compiled(options: argparse.Namespace) -> Path:
    """Made once per folder."""
    path: Path = options.out / f"layers-{options.layers}-{options.batch}-{options.positions}.pt2"
    if path.exists():
        return path
    options.out.mkdir(parents=True, exist_ok=True)
    hidden, heads, head_dim, ff = _sizes(options)
    cache = HostKVCache(
        layers=options.layers, batch=options.batch, kv_heads=heads, head_dim=head_dim, max_length=options.positions,
        device_cap_bytes=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Layers(options.layers, hidden, heads, head_dim, ff, cache).to(torch.bfloat16).requires_grad_(False)
    with torch.no_grad():
        exported = torch.export.export(model, tuple(each.cpu() for each in _inputs(options)))
    offloaded = penstock.apply_weight_offload(exported)
    penstock.compile(offloaded, path, device=options.device, split_linear=options.device.startswith("cuda"))
    return path


def _sizes(options: argparse.Namespace) -> tuple[int, int, int, int]:
    if options.small:
        return SMALL_HIDDEN, SMALL_HEADS, SMALL_HEAD_DIM, SMALL_FF
    return HIDDEN, HEADS, HEAD_DIM, FF


def _inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Every run writes the same position: what comes out does not depend on how often it ran."""
    x = torch.randn(options.batch, 1, _sizes(options)[0], generator=torch.Generator().manual_seed(1))
    start = min(int(options.fill * options.positions), options.positions - 1)
    starts = torch.full((options.batch,), start, dtype=torch.int32)
    return (
        x.to(torch.bfloat16).to(options.device),
        starts.to(options.device),
        torch.ones_like(starts).to(options.device),
    )


def _fill(module: penstock.Module, options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(2)
    # One of them for all: caches take gigabytes.
    held = module.read_state("cache.kv_0")
    for layer in range(options.layers):
        held.copy_(torch.randn(held.shape[-1], generator=generator).to(held.dtype).expand(held.shape))
        module.write_state(f"cache.kv_{layer}", held)


def _timed(module: penstock.Module, inputs: tuple[Tensor, ...], device: str) -> tuple[Tensor, float]:
    with torch.no_grad():
        for _ in range(WARM_UP_RUNS):
            module(*inputs)
        output = module(*inputs).clone()
        synchronize(device)
        return output, time_back_to_back(lambda: module(*inputs), device, ROUND_S).median_s


def _point(
    options: argparse.Namespace,
    path: Path,
    way: Way,
    host_percent: float,
    total_bytes: int,
    bound_s: float,
    inputs: tuple[Tensor, ...],
    wanted: Tensor,
) -> Point:
    placement = way.placement
    if placement == "split" and not options.device.startswith("cuda"):
        placement = "in-place"
    try:
        with mock.patch.object(device_memory, "divide", way.divide):
            module = penstock.Module(path, device_memory=total_bytes, placement=placement, device=options.device)
    except BelowFloorError:
        return Point(host_percent, way.name, total_bytes, None, bound_s)
    with module:
        _fill(module, options)
        if module.budget_bytes < module.full_bytes and placement == "auto":
            # Below the floor of copying there are no copies to measure.
            with suppress(BelowFloorError):
                for in_place in (False, True):
                    with module.calibrate(in_place=in_place), torch.no_grad():
                        for _ in range(CALIBRATING_RUNS):
                            module(*inputs)
        output, seconds = _timed(module, inputs, options.device)
        near = module.device_state_bytes - (module.state_bytes - _cache_bytes(module))
        return Point(
            host_percent,
            way.name,
            total_bytes,
            seconds,
            bound_s,
            weights_budget_bytes=module.budget_bytes,
            device_positions=near * options.positions // _cache_bytes(module),
            bytes_streamed=module.last_run.bytes_streamed,
            equal=torch.equal(output, wanted),
        )


def _cache_bytes(module: penstock.Module) -> int:
    return sum(near.nbytes + far.nbytes for near, far in module.program.caches)


def _totals(options: argparse.Namespace, all_bytes: int, beside_weights_bytes: int) -> list[int]:
    if options.totals:
        return [parse_bytes(total) for total in options.totals]
    return [beside_weights_bytes + all_bytes - all_bytes * ratio // 100 for ratio in options.ratios]


def _cell(point: Point, batch: int) -> str:
    if point.seconds is None:
        return f"{point.way}: below its smallest total"
    wrong = "" if point.equal else " **OTHER BITS**"
    return (
        f"{point.way}: {point.seconds * 1e3:.2f} ms ({point.seconds / point.bound_s:.2f}), "
        f"{batch / point.seconds:.0f} tokens/s, {point.device_positions} positions near{wrong}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--fill", type=float, default=0.5)
    parser.add_argument("--ratios", type=_numbers, default=[0, 10, 25, 50, 75, 90])
    parser.add_argument("--totals", type=lambda text: text.split(","), default=[], help="in the place of ratios")
    names = [way.name for way in WAYS]
    parser.add_argument(
        "--ways", type=lambda text: text.split(";"), default=names, help=f"of {'; '.join(names)}: separated by ;"
    )
    parser.add_argument("--small", action="store_true", help="layers of kilobytes, for machines without a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
