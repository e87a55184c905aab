"""Every call of the CUDA driver made to fail in turn, in a module's load, runs, replays, change of budget and end: the
right error, nothing left on the device, and the next attempt works. tests/runtime/test_module_faults.py runs the same
code over the soft driver. No xdist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.gpu import programs
from tests.gpu.test_runtime_cuda import compiled, device_bytes, floor_of
from tests.runtime.module_lives import Life, Played, fail_in_turn

__all__ = ["compiled"]  # a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# With graphs, and without; from registered and from staged memory; under both policies.
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"cuda_graph": True},
    "registered": {},
    "staged": {"host_memory": "64MiB"},
    "lru": {"placement": "lru"},
}
# Of what CUDA itself keeps, in a context that more and more has been done in.
SLACK_BYTES = 32 << 20


@pytest.fixture(autouse=True)
def _quiet_device() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("way", WAYS)
def test_every_call_of_the_driver_fails_in_turn(compiled: dict[str, Path], way: str) -> None:
    options, path = WAYS[way], compiled["slow_chain"]
    torch.manual_seed(2)
    x = torch.randn(4, programs.SlowChain.SIZES[0], dtype=torch.bfloat16, device="cuda")
    with penstock.Module(path, budget="64GiB") as module:
        wanted, full_bytes = module(x), module.full_bytes
    floor_bytes = floor_of(path, options.get("placement", "auto"), options.get("host_memory", "registered"))
    played = Played(path, "cuda", (x,), wanted, floor_bytes, full_bytes, options)
    # One without a fault first: what a module makes once for a process is no leak.
    assert not Life(played, 1 << 40).live()
    torch.cuda.empty_cache()
    before_bytes = device_bytes()
    seen = fail_in_turn(played)
    torch.cuda.empty_cache()
    assert device_bytes() <= before_bytes + SLACK_BYTES
    expected = {"create_stream", "create_event", "record", "wait", "copy_to_device", "destroy_event", "destroy_stream"}
    expected |= {"pool_allocate", "destroy_pool"} if way == "lru" else {"create_block", "map", "unmap", "release_block"}
    if way == "graphs":
        expected |= {"begin_capture", "end_capture", "launch_graph", "destroy_graph"}
    assert seen >= expected
