"""Programs with linears of ours in a process without Python: one way of summing at every budget, and plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
import penstock.executorch
from penstock.errors import BelowFloorError
from penstock.executorch import backend
from penstock.executorch.lowered_file import read_lowered
from penstock.executorch.native import NativeModule
from penstock.executorch.plan_table import MadeTable, make_plan_tables
from penstock.plan.planner import Planner
from penstock.runtime.session import Stats, counters
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING

Opened = Callable[..., penstock.executorch.Module]
# Wide enough for the library to sum in another order than the core.
WIDTH = 2048
PAGE = 4096


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def export(path: Path, **options: object) -> None:
    torch.manual_seed(0)
    exported = offloaded(Wide().requires_grad_(False), (X,))
    penstock.executorch.export(exported, path, device="cpu", inductor_configs=FAST, split_linear=True, **options)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split") / "model.pte"
    export(path)
    return path


@contextmanager
def alone(program: Path, budget_bytes: int) -> Iterator[Callable[[], tuple[Tensor, Stats]]]:
    """As in a process without Python: a run, and what it moved."""
    native = NativeModule(str(program), [str(program.with_suffix(".ptd"))], str(budget_bytes), f"split {budget_bytes}")
    try:
        native.load_method("forward")
        found = native.session()
        assert found is not None
        handle = found[0]
        yield lambda: (native.execute("forward", (X,))[0], counters(handle)[0])
    finally:
        native.close()


def test_the_bits_are_modules_at_every_plan(program: Path, opened: Opened) -> None:
    module = opened(program, EVERYTHING)
    expected = module(X)
    moved = set()
    for budget_bytes in read_lowered(program).plan_bytes:
        module.set_budget(budget_bytes)
        assert torch.equal(module(X), expected)
        with alone(program, budget_bytes) as run:
            for _ in range(2):
                found, stats = run()
                assert torch.equal(found, expected), budget_bytes
            moved.add((stats.bytes_streamed > 0, stats.bytes_in_place > 0))
    # Copied, split or in place, and all of it resident.
    assert moved >= {(True, False), (False, True), (False, False)}


def made(device: str) -> tuple[MadeTable, Planner]:
    weights = [Weight(f"w{k}", "bfloat16", (64 * PAGE // 128, 64), (0, 1)) for k in range(4)]
    accesses = tuple(Access(number, weight.name, linear=True) for number, weight in enumerate(weights))
    schedule = Schedule("forward", accesses, tuple(Step("kernel", (number,)) for number in range(len(weights))))
    named = {weight.name: weight for weight in weights}
    copying = Planner([schedule], named, page_bytes=PAGE, placement="auto", can_split=False)
    # Staging, which has no weight in place, has a table of its own where there is a plan that does.
    table, *staged = make_plan_tables([schedule], weights, page_bytes=PAGE, device=device)
    assert [one.row.in_place for one in staged] == ([()] if device == "cpu" else [])
    return table, copying


def test_plans_for_a_gpu_split_nothing() -> None:
    """There the kernel is Python's. The floor that the file names is one that holds without."""
    on_gpu, copying = made("cuda")
    on_cpu, _ = made("cpu")
    assert on_cpu.row.floor_bytes < copying.floor_bytes == on_gpu.row.floor_bytes
    assert on_cpu.row.in_place and not on_gpu.row.in_place


def test_a_baked_budget_is_held_against_the_floor_of_the_file(
    program: Path, tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def for_gpu(*arguments: object, **options: object) -> list[MadeTable]:
        return make_plan_tables(*arguments, **{**options, "device": "cuda"})  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "make_plan_tables", for_gpu)
    with pytest.raises(BelowFloorError, match="in a process without Python: it needs at least") as refused:
        export(tmp_path / "low.pte", weight_offload_budget=opened(program, EVERYTHING).floor_bytes)
    export(tmp_path / "model.pte", weight_offload_budget=refused.value.floor_bytes)
    floor_bytes = refused.value.floor_bytes
    assert read_lowered(tmp_path / "model.pte").plan_bytes[0] <= floor_bytes
    with (
        pytest.raises(BelowFloorError, match=f"at least {floor_bytes} bytes"),
        alone(tmp_path / "model.pte", floor_bytes - 1),
    ):
        pass
