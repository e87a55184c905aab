"""A decoding step of one layer over a KV cache that lies partly in host memory: its time, by the part that is far.

    python -m bench.kv_attention [--length 32768] [--batch 1] [--tokens 1] [--programs 1,2,4,8,16,64] [--round 0.3]
                                 [--json OUT]

Shapes are those of Llama-3-8B (8 kv heads of 128, 4 query heads each, bf16). The first table goes over the far share:
microseconds, GB/s of the far part, and the bound: the longer of the two sides, each read at the speed measured for it
in this run (the link by its copy engine, device memory by a copy). Beside it, the same step with the far part copied to
the device first. The second table goes over the number of programs that face the host, at one share: too few leave the
link idle, too many get in the way of the near side, whose time alone is in the last column. Steps are replayed as CUDA
graphs, so that launching them costs nothing. Exits with 1 when a result is further from fp64 than it may be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.suite.prepare import environment
from penstock.kv import HostKVCache, ops
from penstock.kv.cache import HOST_PROGRAMS
from penstock.kv.split import BLOCK_POSITIONS

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
POSITION_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
WARM_UP_RUNS = 3
MOST_RUNS = 200


def main() -> int:
    options = _parser().parse_args()
    link, memory = link_bytes_per_s(options.round), memory_bytes_per_s(options.round)
    print(f"{torch.cuda.get_device_name()}: link {link / 1e9:.1f} GB/s, device memory {memory / 1e9:.0f} GB/s")
    right = True
    by_share: list[dict[str, Any]] = []
    by_programs: list[dict[str, Any]] = []
    print(
        f"\nbatch {options.batch}, length {options.length}, tokens {options.tokens}, {options.host_programs} programs\n"
    )
    print("| far | step | far part | bound | of bound | copied first | error / tolerance |")
    print("|---|---|---|---|---|---|---|")
    for share in options.shares:
        case = Case(options, share, options.host_programs)
        step_s = seconds(case.run, options.round)
        bound_s = max(case.far_bytes / link, case.near_bytes / memory)
        error = case.error()
        right &= error <= 1
        copied_s = seconds(case.run_copied, options.round)
        by_share.append(
            {
                "share": share,
                "seconds": step_s,
                "host_bytes": case.far_bytes,
                "bound_s": bound_s,
                "percent_of_bound": 100 * bound_s / step_s,
                "copied_first_s": copied_s,
                "error_part_of_tolerance": error,
            }
        )
        print(
            f"| {share:.1%} | {step_s * 1e6:.1f} us | {case.far_bytes / step_s / 1e9:.1f} GB/s "
            f"| {bound_s * 1e6:.1f} us | {bound_s / step_s:.0%} "
            f"| {copied_s * 1e6:.1f} us | {error:.2f} |",
            flush=True,
        )
        del case
    print(f"\n{options.share:.1%} far\n")
    print("| programs | step | far part | near side alone |")
    print("|---|---|---|---|")
    for programs in options.programs:
        case = Case(options, options.share, programs)
        step_s = seconds(case.run, options.round)
        near_s = seconds(case.run_near, options.round)
        by_programs.append(
            {"programs": programs, "seconds": step_s, "host_bytes": case.far_bytes, "near_alone_s": near_s}
        )
        print(
            f"| {programs} | {step_s * 1e6:.1f} us | {case.far_bytes / step_s / 1e9:.1f} GB/s "
            f"| {near_s * 1e6:.1f} us |",
            flush=True,
        )
        del case
    if options.json is not None:
        stored = {
            "environment": environment("cuda"),
            "link_bytes_per_s": link,
            "memory_bytes_per_s": memory,
            "batch": options.batch,
            "length": options.length,
            "tokens": options.tokens,
            "host_programs": options.host_programs,
            "by_share": by_share,
            "share": options.share,
            "by_programs": by_programs,
        }
        options.json.write_text(json.dumps(stored, indent=1) + "\n")
    return 0 if right else 1


class Case:
    """A full cache of one layer; the step that is timed is its last, over and over."""

    def __init__(self, options: argparse.Namespace, share: float, programs: int) -> None:
        batch, length, tokens = options.batch, options.length, options.tokens
        near = length if not share else round((1 - share) * length / BLOCK_POSITIONS) * BLOCK_POSITIONS
        self.cache = HostKVCache(
            layers=1,
            batch=batch,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_length=length,
            device_cap_bytes=near * batch * POSITION_BYTES,
            device="cuda",
            host_programs=programs,
        )
        generator = torch.Generator(device="cuda").manual_seed(0)

        def draw(heads: int, count: int) -> Tensor:
            size = (batch, heads, count, HEAD_DIM)
            return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.k, self.v = draw(KV_HEADS, length), draw(KV_HEADS, length)
        self.q = draw(KV_HEADS * GROUP, tokens)
        step = self.cache.begin(length - tokens)
        before = slice(0, length - tokens)
        torch.ops.penstock.kv_append(
            self.cache.kv_0, self.cache.host_kv_0, self.k[:, :, before], self.v[:, :, before],
            step.starts, step.counts,
        )  # fmt: skip
        self.step = self.cache.begin(tokens)
        self.new = self.k[:, :, length - tokens :].contiguous(), self.v[:, :, length - tokens :].contiguous()
        self.far_bytes = self.step.traffic.link_read_bytes
        self.near_bytes = self.step.traffic.device_read_bytes
        self.run()

    def run(self) -> Tensor:
        return self.cache(0, self.q, *self.new, self.step.starts, self.step.counts)

    def run_near(self) -> Tensor:
        """The near side with nothing far: what the far side's readers take from it shows in the difference."""
        near = self.cache.kv_0
        starts = (self.step.starts + self.step.counts).clamp(max=near.shape[3]) - self.step.counts
        far = near[:, :, :, :0].contiguous()
        programs = self.cache.host_programs
        return torch.ops.penstock.kv_attend(self.q, near, far, starts, self.step.counts, HEAD_DIM**-0.5, programs)

    def run_copied(self) -> Tensor:
        """Without direct access: the far part to the device, then torch's own attention over both."""
        kv = torch.cat((self.cache.kv_0, self.cache.host_kv_0.to("cuda", non_blocking=True)), dim=3)
        reach = torch.arange(kv.shape[3] - self.q.shape[2], kv.shape[3], device="cuda")
        mask = None if len(reach) == 1 else torch.arange(kv.shape[3], device="cuda") <= reach[:, None]
        return F.scaled_dot_product_attention(self.q, kv[0], kv[1], attn_mask=mask, enable_gqa=True)

    def error(self) -> float:
        """Of one sequence, as a part of what it may be: fp64 over all of them would not fit."""
        q, k, v = (x[0].double() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(GROUP, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
        reach = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device="cuda")
        hidden = torch.arange(k.shape[1], device="cuda") > reach[:, None]
        shares = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        out = self.run()[0]
        found = ((out.double() - shares @ v).abs() / (shares @ v.abs())).max().item() / ops.TOLERANCE[out.dtype]
        return found if found == found else float("inf")


def seconds(run: Callable[[], object], round_s: float) -> float:
    """The median of replays, for about `round_s`; at least five."""
    for _ in range(WARM_UP_RUNS):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < round_s and len(times) < MOST_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def link_bytes_per_s(round_s: float) -> float:
    source = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / seconds(lambda: target.copy_(source, non_blocking=True), round_s)


def memory_bytes_per_s(round_s: float) -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), round_s)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=1, help="query tokens in the step")
    parser.add_argument("--shares", type=_shares, default=[0, 0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 1], help="far parts")
    parser.add_argument("--share", type=float, default=0.02, help="the far part of the second table")
    parser.add_argument("--programs", type=_numbers, default=[1, 2, 4, 8, 16, 64], help="those of the second table")
    parser.add_argument(
        "--host-programs", type=int, default=HOST_PROGRAMS, help="programs that face the host in the first table"
    )
    parser.add_argument("--round", type=float, default=0.3, help="seconds for each figure, about")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
