"""Linears on a GPU whose weights lie in two places: one kernel, launched by the core from prepared recipes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.direct import availability
from penstock.direct.launch_shape import Limits
from penstock.errors import BelowFloorError, DeviceError, PenstockError
from tests.gpu.test_runtime_cuda import device_bytes, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="the kernel is for GPUs of compute capability 9.0 and newer",
    ),
]

WIDTH, WIDE, NARROW, MOST_TOKENS = 512, 20_008, 1000, 300
# One token, whole tiles and parts of them, and tokens that several CTAs share.
TOKENS = (1, 2, 17, 64, 200, MOST_TOKENS)


class Layers(nn.Module):
    """Weights of several pages of 2 MiB, with rows that are no multiple of a tile, of both kinds of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE, dtype=torch.bfloat16)
        self.down = nn.Linear(WIDE, WIDTH, dtype=torch.bfloat16)
        self.side = nn.Linear(WIDTH, WIDE // 4, bias=False, dtype=torch.float16)
        self.out = nn.Linear(WIDE // 4 - 2, NARROW, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.down(torch.tanh(self.up(x)))
        return self.out(torch.tanh(self.side(h.half()))[:, : WIDE // 4 - 2])


def layers() -> Layers:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Layers().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept in PENSTOCK_GPU_PROGRAMS where that is set."""
    kept = os.environ.get("PENSTOCK_GPU_PROGRAMS")
    path = (Path(kept) if kept else tmp_path_factory.mktemp("split")) / "split_linears" / "model.pt2"
    if not path.exists():
        compile_program(path)
    return path


def compile_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = torch.export.Dim("tokens", min=1, max=MOST_TOKENS)
    example = torch.zeros(7, WIDTH, dtype=torch.bfloat16)
    ep = torch.export.export(layers(), (example,), dynamic_shapes={"x": {0: tokens}})
    penstock.compile(penstock.apply_weight_offload(ep), path, device="cuda", split_linear=True)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, WIDTH, generator=generator).bfloat16().cuda() for count in TOKENS]


def outputs(module: penstock.Module) -> list[torch.Tensor]:
    return [module(x) for x in inputs()]


def opened(path: Path, budget: int | str, **options: Any) -> penstock.Module:
    return penstock.Module(path, budget, **options)


@pytest.fixture(scope="module")
def resident(program: Path) -> list[torch.Tensor]:
    """Every weight in device memory, every linear by the kernel."""
    with opened(program, "64GiB", placement="stream") as module:
        assert module.plan is not None and not module.plan.direct_weights and not module.plan.split_weights
        return outputs(module)


def assert_close(found: list[torch.Tensor]) -> None:
    model = layers().cuda()
    for ours, x in zip(found, inputs(), strict=True):
        theirs = model(x)
        assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()


def test_it_is_the_eager_models_result(resident: list[torch.Tensor]) -> None:
    assert_close(resident)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_bits_are_the_same_at_every_budget(program: Path, resident: list[torch.Tensor], cuda_graph: bool) -> None:
    with opened(program, "64GiB", placement="split", cuda_graph=cuda_graph) as module:
        floor, full = module.floor_bytes, module.full_bytes
        assert same(outputs(module), resident)
    assert floor < full / 2
    split: set[str] = set()
    for part in range(5):
        budget = floor + (full - floor) * part // 4
        before = device_bytes()
        with opened(program, budget, placement="split", cuda_graph=cuda_graph) as module:
            assert module.plan is not None
            split |= set(module.plan.split_weights)
            # Measured before torch computes anything: what the module itself took.
            assert device_bytes() - before <= budget + 64 * 2**20
            for _ in range(3):
                assert same(outputs(module), resident), part
            assert module.device_memory()[1] <= budget
            assert module.stats().copies == 0
            if cuda_graph:
                assert module.stats().replays == 2 * len(TOKENS)
    assert {"up.weight", "down.weight"} <= split
    with pytest.raises(BelowFloorError, match=f"needs at least {floor} bytes"):
        opened(program, floor - 1, placement="split")


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_budgets_change_under_way(program: Path, resident: list[torch.Tensor], cuda_graph: bool) -> None:
    with opened(program, "64GiB", placement="split", cuda_graph=cuda_graph) as module:
        floor, full = module.floor_bytes, module.full_bytes
        for part in (2, 0, 3, 1, 4, 2):
            module.set_budget(floor + (full - floor) * part // 4)
            for _ in range(2):
                assert same(outputs(module), resident), part
            assert module.device_memory()[0] <= module.budget_bytes


@pytest.mark.parametrize("placement", ["auto", "stream", "in-place"])
def test_other_placements_give_the_same_bits(program: Path, resident: list[torch.Tensor], placement: str) -> None:
    with opened(program, "64GiB", placement=placement) as module:
        floor, full = module.floor_bytes, module.full_bytes
        for part in range(3):
            module.set_budget(floor + (full - floor) * part // 3)
            for _ in range(3):
                assert same(outputs(module), resident), part


def test_another_stream(program: Path, resident: list[torch.Tensor]) -> None:
    with opened(program, "64GiB", placement="split") as module:
        module.set_budget((module.floor_bytes + module.full_bytes) // 2)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = outputs(module)
        stream.synchronize()
        assert same(found, resident)


def test_views_are_copied_first(program: Path, resident: list[torch.Tensor]) -> None:
    """Rows that begin at an odd element, and rows that lie across each other."""
    with opened(program, "64GiB", placement="split") as module:
        module.set_budget((module.floor_bytes + module.full_bytes) // 2)
        for x, wanted in zip(inputs(), resident, strict=True):
            odd = torch.zeros(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
            for view in (odd, x.T.contiguous().T):
                assert torch.equal(module(view), wanted)


@pytest.mark.parametrize("limits", [Limits(host_ctas=1, host_inflight_bytes=32 << 10), "measured"])
def test_limits_change_no_bit(program: Path, resident: list[torch.Tensor], limits: Limits | str) -> None:
    with opened(program, "64GiB", placement="split", split_limits=limits) as module:
        module.set_budget((module.floor_bytes + module.full_bytes) // 2)
        assert same(outputs(module), resident)
        assert ("measured for split weights" in module.summary) == (limits == "measured")


def test_refusals(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PenstockError, match='placement="split" does not go with a cap on host memory'):
        opened(program, "64GiB", placement="split", host_memory="1GiB")
    with pytest.raises(PenstockError, match='placement="lru" does not go with a program compiled with split_linear'):
        opened(program, "64GiB", placement="lru")
    monkeypatch.setattr(availability, "_capability", lambda device: (8, 0))
    with pytest.raises(DeviceError, match=r"compute capability 8\.0, and the kernel .* needs 9\.0 or newer"):
        opened(program, "64GiB", placement="split")
    with opened(program, "64GiB") as module:
        assert "no weight is split: this GPU has compute capability 8.0" in module.summary
        assert_close(outputs(module))
