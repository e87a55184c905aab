"""A loop of decoding steps over a long KV cache, end to end: tokens per second, by the part of it that lies far.

    python -m bench.decode_loop --out FOLDER [--layers 8] [--lengths 8192,32768] [--tokens 64] [--small]

Blocks of Llama-3-8B's shape with all weights resident and `penstock.kv.HostKVCache`, one sequence. For each length the
loop writes that many positions' last `--tokens`, one after the other, each over everything before it. "Near" has the
whole cache on the device; far parts are read where they lie. "Copied in" is what a program does without that: eager
PyTorch, the far part of a layer copied to the device while the layer before it computes. The bound is the longer of
everything resident and the far bytes over the link. Exits with 1 when our last output is not, to the bit, that of the
cache that is all near.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from bench.suite.measure import measure_link, synchronize
from bench.suite.model import (
    DTYPE,
    ITEM_BYTES,
    Decoder,
    ModelShape,
    inputs,
    llama3_8b,
    load,
    on_meta,
    small,
    write_weights,
)
from bench.suite.prepare import environment
from penstock.kv import HostKVCache
from penstock.plan.cache_share import CacheGroup, Division, WeightsRange
from penstock.runtime import device_memory

EVERYTHING = "1024TiB"


@dataclass(frozen=True)
class Row:
    length: int
    way: str
    far_percent: float
    seconds_a_token: float
    bound_s: float
    equal: bool | None


class Loop(nn.Module):
    """forward(x[1, 1, hidden], starts[1], counts[1]) -> [1, 1, hidden]."""

    def __init__(self, decoder: Decoder, shape: ModelShape, positions: int) -> None:
        super().__init__()
        # By these names the checkpoint has them.
        self.layers, self.shape = decoder.layers, shape
        self.cache = HostKVCache(
            layers=shape.layers, batch=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, max_length=positions,
            device_cap_bytes=0, device="meta",
        )  # fmt: skip

    def forward(self, x: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        for number, block in enumerate(self.layers):
            q, k, v = projections(block, x, self.shape)
            x = rest_of_block(block, x, self.cache(number, q, k, v, starts, counts))
        return x


class CopiedIn:
    """The same steps without a cache that is read from both sides: two layers' worth of far positions come and go."""

    def __init__(self, decoder: Decoder, shape: ModelShape, length: int, near: int, fill: Tensor) -> None:
        self.layers, self.shape, self.near = decoder.layers, shape, near
        held = fill.expand(2, 1, shape.kv_heads, length, shape.head_dim)
        self.near_kv = [held[:, :, :, :near].contiguous().cuda() for _ in decoder.layers]
        self.far_kv = [held[:, :, :, near:].contiguous().pin_memory() for _ in decoder.layers]
        self.side = torch.cuda.Stream()

    def step(self, x: Tensor, position: int) -> Tensor:
        coming = self._copy(0)
        for number, block in enumerate(self.layers):
            far, copied = coming
            if number + 1 < len(self.layers):
                coming = self._copy(number + 1)
            q, k, v = projections(block, x, self.shape)
            new = torch.stack((k, v))
            copied.wait()
            far[:, :, :, position - self.near : position - self.near + 1] = new
            self.far_kv[number][:, :, :, position - self.near : position - self.near + 1].copy_(new, non_blocking=True)
            keys, values = torch.cat((self.near_kv[number], far), dim=3)[:, :, :, : position + 1]
            x = rest_of_block(block, x, F.scaled_dot_product_attention(q, keys, values, enable_gqa=True))
        return x

    def _copy(self, number: int) -> tuple[Tensor, torch.cuda.Event]:
        far = torch.empty_like(self.far_kv[number], device="cuda")
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            far.copy_(self.far_kv[number], non_blocking=True)
        far.record_stream(self.side)
        return far, self.side.record_event()


def projections(block: nn.Module, x: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
    h = block.attn_norm(x)
    q, k, v = (linear(h).view(1, 1, -1, shape.head_dim).transpose(1, 2) for linear in (block.q, block.k, block.v))
    return q, k, v


def rest_of_block(block: nn.Module, x: Tensor, attention: Tensor) -> Tensor:
    x = x + block.o(attention.transpose(1, 2).reshape(x.shape))
    h = block.mlp_norm(x)
    return x + block.down(F.silu(block.gate(h)) * block.up(h))


def main() -> int:
    options = _parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shape = (small if options.small else llama3_8b)(options.layers)
    longest = max(options.lengths)
    path, weights = _compiled(shape, longest, options.out, options.device)
    position_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * ITEM_BYTES
    link = max(measure_link(options.device).values())
    x = inputs(shape, 1, options.device)
    fill = torch.randn(shape.head_dim, generator=torch.Generator().manual_seed(2)).to(DTYPE)
    rows: list[Row] = []
    print(f"{shape.layers} layers, {options.tokens} tokens a loop, link {link / 1e9:.1f} GB/s\n")
    print("| length | | far | a token | tokens/s | of bound | equal |")
    print("|---|---|---|---|---|---|---|")
    for length in options.lengths:
        wanted, resident_s = None, 0.0
        for share in (0.0, *options.shares):
            near = round((1 - share) * length) // 64 * 64
            with _opened(path, longest if not share else near, options.device) as module:
                _fill(module, fill, shape)
                output, seconds = _timed(_stepper(module, x), length, options)
            wanted = output if wanted is None else wanted
            resident_s = resident_s or seconds
            far_bytes = (length - near if share else 0) * position_bytes
            bound_s = max(resident_s, far_bytes / link)
            way = "read in place" if share else "near"
            rows.append(Row(length, way, 100 * share, seconds, bound_s, torch.equal(output, wanted)))
            _show(rows[-1])
            if share and options.device == "cuda":
                with torch.no_grad():
                    copied = CopiedIn(load(shape, weights, lambda each: each.cuda()), shape, length, near, fill)
                    _, seconds = _timed(lambda position, copied=copied: copied.step(x, position), length, options)
                rows.append(Row(length, "copied in", 100 * share, seconds, bound_s, None))
                _show(rows[-1])
                del copied
    stored = {
        "environment": environment(options.device),
        "layers": shape.layers,
        "tokens": options.tokens,
        "link_bytes_per_s": link,
        "position_bytes": position_bytes,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (options.out / "decode-loop.json").write_text(json.dumps(stored, indent=1) + "\n")
    return int(any(row.equal is False for row in rows))


def _compiled(shape: ModelShape, positions: int, folder: Path, device: str) -> tuple[Path, Path]:
    path, weights = folder / f"loop-{shape.layers}-{positions}.pt2", folder / f"loop-{shape.layers}.safetensors"
    if not weights.exists():
        write_weights(shape, weights)
    if not path.exists():
        example = (inputs(shape, 1, "meta"), *(torch.ones(1, dtype=torch.int32, device="meta") for _ in range(2)))
        with torch.no_grad():
            exported = torch.export.export(Loop(on_meta(shape), shape, positions).eval(), example)
        penstock.compile(penstock.apply_weight_offload(exported), path, device=device, weights=weights)
    return path, weights


def _opened(path: Path, near: int, device: str) -> penstock.Module:
    """All weights, and so many positions of every layer, on the device."""

    def divide(room_bytes: int, weights: WeightsRange, groups: Sequence[CacheGroup]) -> Division:
        return Division(weights.full_bytes, tuple(min(near, group.capacity) for group in groups))

    with mock.patch.object(device_memory, "divide", divide):
        return penstock.Module(path, device_memory=EVERYTHING, device=device)


def _fill(module: penstock.Module, fill: Tensor, shape: ModelShape) -> None:
    for layer in range(shape.layers):
        name = f"cache.kv_{layer}"
        module.write_state(name, fill.expand(module.read_state(name).shape).contiguous())


def _stepper(module: penstock.Module, x: Tensor) -> Callable[[int], Tensor]:
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return lambda position: module(x, one * position, one)


def _timed(step: Callable[[int], Tensor], length: int, options: argparse.Namespace) -> tuple[Tensor, float]:
    """Each loop writes the same positions; the second one is timed."""
    with torch.no_grad():
        for _ in range(2):
            synchronize(options.device)
            started = time.perf_counter()
            for position in range(length - options.tokens, length):
                output = step(position)
            synchronize(options.device)
            seconds = time.perf_counter() - started
    return output.clone(), seconds / options.tokens


def _show(row: Row) -> None:
    equal = {True: "yes", False: "NO", None: ""}[row.equal]
    print(
        f"| {row.length} | {row.way} | {row.far_percent:.0f}% | {row.seconds_a_token * 1e3:.2f} ms "
        f"| {1 / row.seconds_a_token:.1f} | {row.seconds_a_token / row.bound_s:.2f} | {equal} |",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], default=[8192, 32768])
    parser.add_argument(
        "--shares", type=lambda text: [float(each) for each in text.split(",")], default=[0.05, 0.25, 0.5, 0.9],
        help="far parts of a length",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="layers of kilobytes, for machines without a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
