"""Measures the cases of bench.split_linear: cases on the standard input, one JSON a line, one answer each."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle

import torch

from bench.split_linear import Case
from penstock.direct.launch_shape import Limits
from penstock.direct.split_linear import Options, SplitLinear
from penstock.direct.tile_shape import choose_tile
from penstock.errors import PenstockError

# Copies of the resident part, taken in turn: a weight that the L2 still holds from the run before would flatter HBM.
COPIES = 3
ROUNDS = 7
# A graph lasts about this long, so that what its own launch takes, some microseconds, is not charged to the kernel.
GRAPH_S = 4e-3
MOST_TURNS = 20
# Of a block on GPUs of compute capability 12.x.
SMALL_SHARED_BYTES = 101_376


class HostView:
    """Pinned host memory as CUDA's array interface, so that torch takes it for a tensor on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<i2",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


@cache
def host_weight(rows: int, depth: int) -> torch.Tensor:
    torch.manual_seed(1)
    weight = (torch.randn(rows, depth, device="cuda") / depth**0.5).to(torch.bfloat16)
    pinned: torch.Tensor = weight.cpu().pin_memory()
    return pinned


def head_rows_of(case: Case) -> int:
    """On a border of tiles that is nearest to the ratio; three grains off it where that is what is measured."""
    if case.ratio_percent == 0:
        return case.rows
    band = choose_tile(case.tokens).cluster_rows
    exact = case.rows * (100 - case.ratio_percent) / 100
    if case.way == "split_unaligned":
        return max(int(exact) // band * band - 48, 0)
    # Below a band, what was asked for is nearer to the question than a border is.
    aligned = round(exact / band) * band
    return min(aligned, case.rows) if 0 < aligned < case.rows else int(exact) // 16 * 16


def timed_s(run: Callable[[], object]) -> float:
    """Of one run, in a graph that takes every copy in turn: a launch from Python takes longer than a short kernel."""
    run()
    torch.cuda.synchronize()
    once_s = statistics.median(_rounds_s(run, 1, 3))
    turns = max(1, min(int(GRAPH_S / COPIES / once_s), MOST_TURNS))
    return statistics.median(_rounds_s(run, turns, ROUNDS))


def _rounds_s(run: Callable[[], object], turns: int, rounds: int) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES * turns):
            run()
    graph.replay()
    times_s: list[float] = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3 / (COPIES * turns))
    return times_s


@contextmanager
def whole_sums() -> Iterator[None]:
    """cuBLAS may not sum in 16 bits: the kernel does not either."""
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


def measure(kernel: SplitLinear, case: Case) -> float:
    head_rows = head_rows_of(case)
    tail = host_weight(case.rows, case.depth)[head_rows:]
    head = host_weight(case.rows, case.depth)[:head_rows].cuda()
    heads = cycle([head, *(head.clone() for _ in range(COPIES - 1))])
    x = torch.randn(case.tokens, case.depth, device="cuda").to(torch.bfloat16)
    y = torch.empty(case.tokens, case.rows, dtype=torch.bfloat16, device="cuda")
    if case.way == "cublas_uva":
        over_link = torch.as_tensor(HostView(tail.view(torch.int16)), device="cuda").view(torch.bfloat16)

        def run() -> None:
            if head_rows:
                torch.mm(x, next(heads).T)
            torch.mm(x, over_link.T)

    elif case.way == "copy_then_compute":
        wholes = cycle([torch.empty(case.rows, case.depth, dtype=torch.bfloat16, device="cuda") for _ in range(COPIES)])

        def run() -> None:
            whole = next(wholes)
            if head_rows < case.rows:
                whole[head_rows:].copy_(tail, non_blocking=True)
            torch.mm(x, whole.T, out=y)

    else:
        limits = Limits(host_ctas=case.host_ctas, host_inflight_bytes=case.inflight_kib << 10)
        options = Options(
            limits=None if case.way == "split_unlimited" else limits,
            multicast=case.way not in ("split_no_multicast", "split_small"),
            overlapped=case.way == "split_overlapped",
            instructions="mma_sync" if case.way in ("split_mma_sync", "split_small") else "own",
            shared_limit_bytes=SMALL_SHARED_BYTES if case.way == "split_small" else None,
        )
        side_rows = {"hbm_alone": head_rows, "host_alone": case.rows - head_rows}.get(case.way, case.rows)
        out = y[:, :side_rows]

        def run() -> None:
            here = None if case.way == "host_alone" else next(heads)
            kernel(x, here, None if case.way == "hbm_alone" else tail, out=out, options=options)

    with whole_sums():
        return timed_s(run)


def main() -> None:
    kernel = SplitLinear("cuda")
    for line in sys.stdin:
        case = Case(**json.loads(line))
        failure: str | None = None
        seconds: float | None = None
        try:
            seconds = measure(kernel, case)
        except (RuntimeError, PenstockError) as error:
            # A lost context raises here again and ends the process: the next one starts with a fresh context.
            torch.cuda.synchronize()
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps({"head_rows": head_rows_of(case), "seconds": seconds, "failure": failure}), flush=True)


if __name__ == "__main__":
    main()
