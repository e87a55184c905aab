"""Measures how much of a GPU should face the host: the limits that keep the link busy and disturb HBM the least.

Two weights are timed for each pair of limits. One lies on the host as a whole. The other has so many rows there that
both sides take about equally long: here too many requests to the host would hold up the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.direct.launch_shape import Limits
from penstock.direct.self_check import open_kernel
from penstock.direct.split_linear import Options, SplitLinear

HOST_CTAS = (1, 2, 4, 8)
INFLIGHT_BYTES_PER_CTA = (32 << 10, 64 << 10, 128 << 10)
# Within this factor of the fastest counts as equally fast: measurements differ that much by themselves.
AS_FAST = 1.01
# 32 MiB over the link take 0.6 ms, as long as ten launches from Python.
ROWS, DEPTH = 4096, 4096
BALANCED_HOST_ROWS = 96
# Rows on the device: more than any cache of a GPU holds, so that its memory is what is timed.
DEVICE_ROWS = 4 * ROWS
# What measuring takes on the device, with room for results.
DEVICE_BYTES = (DEVICE_ROWS + 256) * DEPTH * 2
LAUNCHES, ROUNDS = 4, 3


@dataclass(frozen=True)
class Trial:
    limits: Limits
    # All of the weight on the host; and both sides at work for about the same time.
    host_s: float
    balanced_s: float


def choose_limits(trials: Sequence[Trial]) -> Limits:
    """Of the limits that read the host fastest, those that are fastest with both sides; of equals, the smallest."""
    fastest_s = min(trial.host_s for trial in trials)
    busy = [trial for trial in trials if trial.host_s <= fastest_s * AS_FAST]
    balanced_s = min(trial.balanced_s for trial in busy)
    equals = [trial for trial in busy if trial.balanced_s <= balanced_s * AS_FAST]
    return min(equals, key=lambda trial: (trial.limits.host_inflight_bytes, trial.limits.host_ctas)).limits


def measure_limits(device: torch.device | str) -> Limits:
    """With one token, on an otherwise idle GPU. Takes DEVICE_BYTES there and 32 MiB of pinned host memory meanwhile."""
    kernel = open_kernel(device)
    try:
        return _measured(kernel, torch.device(device))
    finally:
        kernel.close()
        # Weights and activations would lack the memory that torch keeps cached from this.
        torch.cuda.empty_cache()


def _measured(kernel: SplitLinear, device: torch.device) -> Limits:
    x = torch.ones(1, DEPTH, dtype=torch.bfloat16, device=device)
    rows = torch.zeros(DEVICE_ROWS, DEPTH, dtype=torch.bfloat16, device=device)
    trials = _trials(kernel, x, rows)
    device_s = _seconds(partial(kernel, x, rows, None, options=Options()), device)
    chosen = choose_limits(trials)
    host_s = next(trial.host_s for trial in trials if trial.limits == chosen)
    return replace(chosen, link_bytes_per_s=ROWS * DEPTH * 2 / host_s, hbm_bytes_per_s=rows.nbytes / device_s)


def _trials(kernel: SplitLinear, x: torch.Tensor, rows: torch.Tensor) -> list[Trial]:
    device = x.device
    host = torch.zeros(ROWS, DEPTH, dtype=torch.bfloat16).pin_memory()
    # Larger than the part on the host by the ratio of the bandwidths, so that neither side waits long.
    prefix = rows[: 2 * ROWS]
    rest = host[:BALANCED_HOST_ROWS]
    trials = []
    for host_ctas in HOST_CTAS:
        for inflight_bytes in INFLIGHT_BYTES_PER_CTA:
            limits = Limits(host_ctas=host_ctas, host_inflight_bytes=host_ctas * inflight_bytes)
            options = Options(limits=limits)
            host_s = _seconds(partial(kernel, x, None, host, options=options), device)
            balanced_s = _seconds(partial(kernel, x, prefix, rest, options=options), device)
            trials.append(Trial(limits, host_s, balanced_s))
    return trials


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one launch: the shortest of some rounds, in a CUDA graph, because launching from Python takes longer."""
    with torch.cuda.device(device):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                run()
        times_s: list[float] = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_s.append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
        return min(times_s)
