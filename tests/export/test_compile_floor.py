"""Export and load refuse a budget at the same byte, and name the same floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
import penstock.export.compile as compile_module
from penstock.errors import BelowFloorError
from penstock.export.method import CompiledMethod
from penstock.plan.floor import floor_bytes
from penstock.plan.in_place import read_directly_by_default, stand_ins
from penstock.plan.pages import CUDA_PAGE_BYTES, page_bytes_on, soft_page_bytes
from penstock.plan.planner import Planner
from penstock.program import Program, read_program
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight
from tests.export.builds import build, shifted, stand_in, unchanged
from tests.harness import offloaded

PAGE = 4096


class Sized(nn.Module):
    """Weights of these sizes in bytes, each read once and in this order."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size // 4) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight.sum()
        return x


class Branch(nn.Module):
    """Control flow reads two of its weights: they stay on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(48, 48), nn.Linear(48, 80)
        self.yes, self.no = nn.Parameter(torch.ones(48, 48)), nn.Parameter(torch.ones(48, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        h = torch.cond(x.sum() > 0, lambda h: h @ self.yes, lambda h: h @ self.no, (h,))
        return self.after(h)


class Table(nn.Module):
    """What is gathered from is read in place, and everything else is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(500, 40), nn.Linear(40, 90), nn.Linear(90, 130)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.embed(tokens)))


def sized(*sizes: int) -> torch.export.ExportedProgram:
    return offloaded(Sized(*sizes), (torch.ones(2),))


PROGRAMS: dict[str, Callable[[], Any]] = {
    "one weight": lambda: sized(5 * PAGE + 4),
    "many alike": lambda: sized(*[3 * PAGE] * 9),
    # All live ranges of a short cycle overlap each other, and placing them takes more than the formula says.
    "short cycle": lambda: sized(*(pages * PAGE for pages in (5, 2, 5, 2, 3))),
    "less than a page each": lambda: sized(*[400] * 6),
    "ends within pages": lambda: sized(*(700 * k for k in range(1, 12))),
    "control flow": lambda: offloaded(Branch(), (torch.ones(2, 48),)),
    "gathered table": lambda: offloaded(Table(), (torch.arange(4),)),
    "two methods": lambda: {name: offloaded(model, (torch.ones(3, 80),)) for name, model in shifted(80).items()},
}


@pytest.fixture
def gathering(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of the compiler knows nothing of gathers: what is called `embed` is gathered from."""

    def compile_method(*given: Any, **options: Any) -> CompiledMethod:
        made = stand_in(*given, **options)
        schedule = made.method.schedule
        accesses = tuple(replace(one, gathered=one.weight.startswith("embed")) for one in schedule.accesses)
        return replace(made, method=replace(made.method, schedule=replace(schedule, accesses=accesses)))

    monkeypatch.setattr(compile_module, "compile_method", compile_method)


def refused_at_load(path: Path, budget_bytes: int) -> BelowFloorError:
    """Before any code is loaded, so that a stand-in's will do."""
    with pytest.raises(BelowFloorError) as refused:
        penstock.Module(path, budget_bytes)
    return refused.value


def schedules_and_weights(program: Program) -> tuple[list[Schedule], dict[str, Weight]]:
    return [method.schedule for method in program.methods], {weight.name: weight for weight in program.weights}


@pytest.mark.parametrize("name", PROGRAMS)
def test_export_and_load_refuse_at_the_same_byte(gathering: None, tmp_path: Path, name: str) -> None:
    programs = PROGRAMS[name]()
    made = build(programs, tmp_path)
    floor = made.program.floor_bytes
    assert floor > 0 and floor == made.floor.floor_bytes == read_program(made.program_path).floor_bytes
    made.floor.plan.method(made.program.methods[0].name)
    assert made.floor.plan.device_bytes <= floor
    assert build(programs, tmp_path, weight_offload_budget=floor, overwrite=True).program.budget_bytes == floor
    for below in (floor - 1, 0):
        loading = refused_at_load(made.program_path, below)
        with unchanged(tmp_path), pytest.raises(BelowFloorError) as exporting:
            build(programs, tmp_path, weight_offload_budget=below, overwrite=True)
        for refusal in (exporting.value, loading):
            assert (refusal.budget_bytes, refusal.floor_bytes) == (below, floor)
            assert f"needs at least {floor} bytes" in str(refusal)


def test_the_placed_floor_holds_where_the_formula_gives_less(quick: None, tmp_path: Path) -> None:
    for name in ("short cycle", "ends within pages"):
        program = build(PROGRAMS[name](), tmp_path, overwrite=True).program
        schedules, weights = schedules_and_weights(program)
        formula = floor_bytes(*stand_ins(schedules, weights, read_directly_by_default))
        assert formula.floor_bytes < program.floor_bytes


def test_a_table_that_is_gathered_from_is_in_no_floor(gathering: None, tmp_path: Path) -> None:
    program = build(PROGRAMS["gathered table"](), tmp_path).program
    (table,) = [weight.nbytes for weight in program.weights if weight.name == "embed.weight"]
    schedules, weights = schedules_and_weights(program)
    streamed = Planner(schedules, weights, page_bytes=PAGE, placement="stream").floor_bytes
    assert program.floor_bytes < table < streamed


def test_both_refusals_name_the_modes_that_take_less(gathering: None, tmp_path: Path) -> None:
    programs = PROGRAMS["control flow"]()
    made = build(programs, tmp_path)
    planner = Planner(*schedules_and_weights(made.program), page_bytes=PAGE, placement="in-place")
    assert 0 < planner.floor_bytes < made.program.floor_bytes, "what control flow reads stays"
    wanted = f'That is for placement="auto"; placement="in-place" needs {planner.floor_bytes} bytes'
    loading = str(refused_at_load(made.program_path, 0))
    with pytest.raises(BelowFloorError) as exporting:
        build(programs, tmp_path, weight_offload_budget=0, overwrite=True)
    assert wanted in loading and wanted in str(exporting.value)
    assert 'placement="split"' not in loading + str(exporting.value), "no weight of it can be split"
    for options in ({"placement": "stream"}, {"placement": "lru"}):
        with pytest.raises(BelowFloorError) as other:
            penstock.Module(made.program_path, 0, **options)
        assert "That is for" not in str(other.value)


def test_a_weight_that_can_be_split_is_offered_that_mode(quick: None, tmp_path: Path) -> None:
    # Each is read three times in a row: once copied, and three times over the link, which is too much for "auto".
    layers = [nn.Linear(64, 64, bias=False) for _ in range(8)]
    model = nn.Sequential(*(layer for layer in layers for _ in range(3))).bfloat16()
    programs = offloaded(model, (torch.ones(2, 64, dtype=torch.bfloat16),))
    made = build(programs, tmp_path, split_linear=True)
    planner = Planner(*schedules_and_weights(made.program), page_bytes=PAGE, placement="split")
    wanted = f'placement="in-place" needs 0 bytes and placement="split" needs {planner.floor_bytes} bytes'
    assert planner.floor_bytes < made.program.floor_bytes
    assert wanted in str(refused_at_load(made.program_path, 0))
    with pytest.raises(BelowFloorError, match=wanted):
        build(programs, tmp_path, split_linear=True, weight_offload_budget=0, overwrite=True)


def test_a_gpu_has_larger_pages() -> None:
    weights = {name: Weight(name, "float32", (300_000,), (0,)) for name in "abcdef"}
    accesses = tuple(Access(number, name) for number, name in enumerate(weights))
    schedules = [Schedule("forward", accesses, tuple(Step(one.weight, (one.number,)) for one in accesses))]
    sizes = {
        device: compile_module._floor(schedules, weights, torch.device(device), None).floor_bytes
        for device in ("cpu", "cuda")
    }
    for device, nbytes in sizes.items():
        page_bytes = page_bytes_on(device, sum(weight.nbytes for weight in weights.values()))
        assert nbytes == Planner(schedules, weights, page_bytes=page_bytes, placement="auto").floor_bytes
        with pytest.raises(BelowFloorError) as refused:
            compile_module._floor(schedules, weights, torch.device(device), nbytes - 1)
        assert refused.value.floor_bytes == nbytes
    assert sizes["cuda"] % CUDA_PAGE_BYTES == 0 and sizes["cpu"] < sizes["cuda"]


def test_pages_grow_with_a_program_up_to_those_of_a_gpu() -> None:
    assert [soft_page_bytes(nbytes) for nbytes in (0, 64 << 20, (64 << 20) + 1, 1 << 30, 1 << 60)] == [
        4096,
        4096,
        8192,
        65536,
        CUDA_PAGE_BYTES,
    ]
    assert page_bytes_on("cuda", 0) == page_bytes_on("cuda", 1 << 60) == CUDA_PAGE_BYTES
    assert page_bytes_on("cpu", 1 << 30) == soft_page_bytes(1 << 30)
