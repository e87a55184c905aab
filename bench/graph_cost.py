"""What a graph changes: runs and replays of one plan in turn, so that a link whose speed drifts drifts for both.

    python -m bench.graph_cost PROGRAM.pt2 [--budgets 0.1,0.5,0.9,1] [--turns 3] [--round 1.0]

For programs with one method and one input of a fixed shape, such as the suite's (`python -m bench.suite` leaves them in
its folder). Prints milliseconds per forward back to back and microseconds until a call returns on an idle device, as
medians over the turns. Exits with 1 when an output differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

import torch

import penstock
from bench.suite.measure import WARM_UP_RUNS, time_back_to_back, time_host


def main() -> int:
    options = _parser().parse_args()
    program = penstock.read_program(options.program)
    (spec,) = program.methods[0].signature.inputs
    assert isinstance(spec, penstock.program.TensorSpec), "the input is a tensor"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn([int(size) for size in spec.shape], generator=generator).to(getattr(torch, spec.dtype)).cuda()
    with penstock.Module(options.program, "1024TiB") as module:
        wanted = module(x)
    print("| budget | copies | run | replay | replay / run | host, run | host, replay | equal |")
    print("|---|---|---|---|---|---|---|---|")
    all_equal = True
    for fraction in options.budgets:
        budget = "1024TiB" if fraction >= 1 else int(fraction * program.weight_bytes)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        equal = True
        for _ in range(options.turns):
            for cuda_graph in times:
                with penstock.Module(options.program, budget, cuda_graph=cuda_graph) as module:
                    for _ in range(WARM_UP_RUNS):
                        equal &= torch.equal(module(x), wanted)
                    round_s = time_back_to_back(lambda: module(x), "cuda", options.round).median_s
                    host_s = time_host(lambda: module(x), "cuda", options.round)[0].median_s
                    assert module.last_run.replays == int(cuda_graph)
                    copies = module.last_run.copies
                times[cuda_graph].append((round_s, host_s))
        (run_s, run_host_s), (replay_s, replay_host_s) = (
            [median(c) for c in zip(*times[g], strict=True)] for g in times
        )
        print(
            f"| {fraction:.0%} | {copies} | {run_s * 1e3:.3f} ms | {replay_s * 1e3:.3f} ms | {replay_s / run_s:.4f} "
            f"| {run_host_s * 1e6:.0f} us | {replay_host_s * 1e6:.0f} us | {'yes' if equal else 'NO'} |",
            flush=True,
        )
        all_equal &= equal
    return 0 if all_equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument(
        "--budgets",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.1, 0.25, 0.5, 0.75, 0.9, 1.0],
        help="parts of the weights; from 1 on all are resident",
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--round", type=float, default=0.5, help="seconds of back-to-back runs in a round, about")
    return parser


if __name__ == "__main__":
    sys.exit(main())
