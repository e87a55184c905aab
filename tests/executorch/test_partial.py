"""Programs of which a part is left to ExecuTorch's own kernels: several delegates, one session, one budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn

from penstock.errors import BelowFloorError, ProgramError, UnsupportedProgramError
from penstock.executorch.partitioner import CudaPartitioner
from penstock.weights import read_index
from tests.executorch.programs import Split, random_rows, seeded, split
from tests.harness import FAST, offloaded


def test_a_part_left_out_runs_between_two_delegates(lowered: Callable[[str], Path], opened: Callable[..., Any]) -> None:
    path = lowered("split")
    reference = seeded(Split).eval()
    resident = opened(path, "1GiB")
    floor_bytes = resident.floor_bytes
    module = opened(path, floor_bytes)
    for run in range(3):
        x = random_rows(2, seed=run)
        found = module(x)
        torch.testing.assert_close(found, reference(x))
        assert torch.equal(found[0], resident(x)[0])
    # Two delegates ran, in one session: the second finds the ring in the hands of the first.
    assert [method.name for method in module.program.methods] == ["forward__0", "forward__1"]
    assert module.stats().runs == 2 * 3
    assert module.device_memory()[1] <= floor_bytes
    with pytest.raises(BelowFloorError, match=str(floor_bytes)):
        opened(path, floor_bytes - 1)


def test_a_weight_that_two_delegates_read_is_stored_once(lowered: Callable[[str], Path]) -> None:
    index = read_index(lowered("split").with_suffix(".ptd"))
    shapes = [entry.shape for entry in index.unique_entries]
    assert len(shapes) == 5  # with the first values of its state
    assert shapes.count((96, 96)) == 2
    assert index["last.weight"].alias_of == "first.weight"
    assert all(entry.offset_bytes % 4096 == 0 for entry in index)


def test_other_backends_choose_after_ours() -> None:
    pytest.importorskip("torchao")  # that one needs it
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    program = offloaded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.ones(2, 8),))
    ours = CudaPartitioner(device="cpu", inductor_configs=FAST)
    with pytest.raises(UnsupportedProgramError, match="put CudaPartitioner first"):
        to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner(), ours])


def test_leaving_out_an_op_that_is_not_there_is_refused() -> None:
    ours = CudaPartitioner(device="cpu", leave=["aten::conv2d"])
    with pytest.raises(ProgramError, match="leave: the lowered program has no op aten::conv2d; it has .*aten::softmax"):
        to_edge_transform_and_lower(split(), partitioner=[ours])
    with pytest.raises(ProgramError, match="'softmax' is not an op"):
        CudaPartitioner(device="cpu", leave=["softmax"])
