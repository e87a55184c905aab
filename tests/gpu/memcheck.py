"""A small program at its floor, on both policies and as a graph: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python -m tests.gpu.memcheck MODEL.pt2

API errors are not reported because one is part of the game: a capped pool refuses until its releases have completed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import penstock
from tests.gpu import programs


def main(path: Path) -> None:
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    with penstock.Module(path, budget="64GiB") as module:
        wanted = module(x)
    for placement, cuda_graph in (("auto", False), ("auto", True), ("lru", False)):
        with penstock.Module(path, budget="64GiB", placement=placement, cuda_graph=cuda_graph) as module:
            module.set_budget(module.floor_bytes)
            for _ in range(3):
                assert torch.equal(module(x), wanted)
            assert module.last_run.bytes_streamed > 0
    print("memcheck run complete")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
