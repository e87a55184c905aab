"""A small program at its floor, on both policies and as a graph, with its weights as they are and packed; and damaged
packed weights, decoded one by one: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python -m tests.gpu.memcheck MODEL.pt2

API errors are not reported because one is part of the game: a capped pool refuses until its releases have completed.
With `overrun` in the place of MODEL.pt2 a block is decoded that ends before it should: memcheck must report that, and
the exit status be 9.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import penstock
from penstock.plan.plan import Plan
from penstock.runtime.module import Module
from tests.gpu import programs
from tests.gpu.device_kernels import DeviceKernels
from tests.weights.damaged_weights import check, damaged_weights
from tests.weights.kernel_stress import blocks_of
from tests.weights.packed_cases import earlier_code

EVERYTHING = "64GiB"
DAMAGED = 300
# Of the way from the floor to everything: where some of the packed weights stay packed in device memory.
STORED_PARTS = (0.5, 0.7, 0.3, 0.9, 0.2)


def run_raw(path: Path, x: torch.Tensor, wanted: torch.Tensor) -> None:
    for placement, cuda_graph in (("auto", False), ("auto", True), ("lru", False)):
        with penstock.Module(path, budget=EVERYTHING, placement=placement, cuda_graph=cuda_graph) as module:
            module.set_budget(module.floor_bytes)
            for _ in range(3):
                assert torch.equal(module(x), wanted)
            assert module.last_run.bytes_streamed > 0


def run_packed(path: Path, x: torch.Tensor, wanted: torch.Tensor, weights: Path, *, cuda_graph: bool) -> None:
    """At the floor, with some weights that stay packed, and with everything decoded at load."""
    with penstock.Module(path, budget=EVERYTHING, weights=weights, cuda_graph=cuda_graph) as module:
        assert torch.equal(module(x), wanted)
        for budget_bytes in (module.floor_bytes, _stored_bytes(module)):
            module.set_budget(budget_bytes)
            for _ in range(3):
                assert torch.equal(module(x), wanted)
            assert module.last_run.bytes_decoded > 0
        assert _plan(module).stores


def decode_damaged(kernels: DeviceKernels) -> None:
    for weight in damaged_weights(seed=0, count=DAMAGED):
        check(kernels.decoded, weight)


def overrun(kernels: DeviceKernels) -> None:
    """A block without half of its rests."""
    raw = bytes(4096)
    (block,) = blocks_of(6, raw)
    kernels.decoded(6, [block[: len(block) // 32 * 16]], len(raw), 0, len(raw) // 2)


def _stored_bytes(module: Module) -> int:
    floor_bytes, full_bytes = module.floor_bytes, module.full_bytes
    budgets = [int(floor_bytes + (full_bytes - floor_bytes) * part) for part in STORED_PARTS]
    for budget_bytes in budgets:
        plan = module.plan_at(budget_bytes)
        if plan is not None and plan.stores:
            return budget_bytes
    raise AssertionError(f"at none of {budgets} bytes anything stays packed")


def _plan(module: Module) -> Plan:
    assert module.plan is not None
    return module.plan


def main(path: Path) -> None:
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    with penstock.Module(path, budget=EVERYTHING) as module:
        wanted = module(x)
    run_raw(path, x, wanted)
    with TemporaryDirectory() as folder:
        packed = penstock.pack(path.with_suffix(".ptd"), Path(folder) / "packed.ptd", program=path).path
        with earlier_code():
            earlier = penstock.pack(path.with_suffix(".ptd"), Path(folder) / "earlier.ptd", program=path).path
        for weights, cuda_graph in ((packed, False), (packed, True), (earlier, False)):
            run_packed(path, x, wanted, weights, cuda_graph=cuda_graph)
    decode_damaged(DeviceKernels())
    print("memcheck run complete")


if __name__ == "__main__":
    if sys.argv[1] == "overrun":
        overrun(DeviceKernels())
    else:
        main(Path(sys.argv[1]))
