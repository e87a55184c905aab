"""The line that says what was loaded: a process without Python is told what Python is told, word for word."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.budget import format_bytes
from penstock.executorch import merge_weights
from tests.executorch.cpp_program import build_program
from tests.executorch.players import CppPlayer
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING

WIDTH = 256
# What was timed when the plan was installed is another number in every process.
MEASURED = re.compile(r"\d+\.\d(?= GB/s|,|\)| \(|$)")
# What a plan decides.
PLAN = re.compile(r"(?<=\), ).*(?=, copies at |, no copies)")
PERCENTS = (25, 50, 75, 90)
Told = Callable[..., list[str]]


# A C++ program is built for them.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def binary(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("behaviour_probe.cpp")
    return build_program(source, library, tmp_path_factory.mktemp("cpp") / "behaviour_probe")


@pytest.fixture
def told(binary: Path, tmp_path: Path) -> Told:
    """What a process in C++ has in its log after it loaded a program and then set budgets, one after the other."""

    def lines(program: Path, weights: Path, budget: int | None, *later: int) -> list[str]:
        log = tmp_path / "log"
        with log.open("w") as file:
            player = CppPlayer(binary, log=file)
            player.open(program, weights, budget)
            for budget_bytes in later:
                player.set_budget(budget_bytes)
            player.close()
        said = (line.partition("] penstock: ") for line in log.read_text().splitlines())
        return [text for _, found, text in said if found]

    return lines


def without_times(line: str) -> str:
    head, copies, tail = line.partition("copies at ")
    return head + copies + MEASURED.sub("#", tail)


@dataclass(frozen=True)
class Said:
    summary: str
    clamp: str
    plan_bytes: int

    @classmethod
    def of(cls, module: Any) -> Said:
        """As Python's logger is told."""
        assert module.plan is not None
        clamp = module._sessions.sharing._choice.clamp_sentence
        return cls(without_times(module.summary), clamp, module.plan.device_bytes)


def check(told: Told, program: Path, weights: Path) -> None:
    """At load, and after a change: the floor, parts of the weights, everything, and more than that."""
    with penstock.Module(program, EVERYTHING, weights=weights) as module:
        full_bytes = module.full_bytes
        budgets = [module.weight_bytes * percent // 100 for percent in PERCENTS]
        budgets = [module.floor_bytes, *(one for one in budgets if one > module.floor_bytes)]
        budgets += [full_bytes, full_bytes + (1 << 20)]
    same_plans = 0
    for budget_bytes in budgets:
        with penstock.Module(program, budget_bytes, weights=weights) as module:
            wanted = [Said.of(module)]
            module.set_budget(budgets[-3])
            wanted.append(Said.of(module))
        assert bool(wanted[0].clamp) == (budget_bytes > full_bytes)
        assert "(given at load)" in wanted[0].summary and "(given to set_budget)" in wanted[1].summary
        found = [without_times(line) for line in told(program, weights, budget_bytes, budgets[-3])]
        for said in wanted:
            summary, clamp = found.pop(0), found.pop(0) if said.clamp else ""
            plan = found.pop(0)
            assert clamp == said.clamp
            assert plan.startswith("plan ") and plan.endswith(f"weights from {weights}, held in memory")
            # The file may have a plan that was made for another budget: it fits this one, too, and takes no less.
            is_same = summary == said.summary
            same_plans += is_same
            assert is_same or PLAN.sub("", summary) == PLAN.sub("", said.summary)
            assert not is_same or f" in the file takes {format_bytes(said.plan_bytes)}, " in plan
        assert not found
    assert same_plans > len(budgets) // 2


@pytest.mark.parametrize("name", ["chain", "split", "decoder", "hazards", "twin"])
def test_programs_as_they_are(told: Told, lowered: Callable[[str], Path], name: str) -> None:
    program = lowered(name)
    check(told, program, program.with_suffix(".ptd"))


def test_packed_weights(told: Told, tmp_path: Path) -> None:
    """With plans of their own in the file: what stays packed in device memory is said, too."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(16)))
    example = torch.ones(3, WIDTH, dtype=torch.bfloat16)
    program, packed = tmp_path / "model.pte", tmp_path / "packed.ptd"
    penstock.executorch.export(offloaded(layers.eval(), (example,)), program, device="cpu", inductor_configs=FAST)
    merge_weights([program.with_suffix(".ptd")], tmp_path / "raw.ptd")
    penstock.pack(tmp_path / "raw.ptd", packed, program=program)
    check(told, program, packed)
    with penstock.Module(program, EVERYTHING, weights=packed) as module:
        budget_bytes = module.weight_bytes * 90 // 100
    assert " of weights stay packed in " in told(program, packed, budget_bytes)[0]


def test_a_table_read_in_place(told: Told, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    program = tmp_path / "model.pte"
    exported = offloaded(model.eval(), (torch.zeros(2, 3, dtype=torch.int64),))
    penstock.executorch.export(exported, program, device="cpu", inductor_configs=FAST)
    check(told, program, program.with_suffix(".ptd"))
    with penstock.Module(program, EVERYTHING) as module:
        floor_bytes = module.floor_bytes
    assert "512 KiB read in place" in told(program, program.with_suffix(".ptd"), floor_bytes)[0]


def test_a_delegate_with_a_budget_of_its_own(
    lowered: Callable[[str], Path], opened: Callable[..., penstock.executorch.Module]
) -> None:
    """A program in C++ that gives one a budget: tests/executorch/option_probe.cpp. Here, what Python says of it."""
    module = opened(lowered("decoder"), EVERYTHING, delegate_budgets={"decode": EVERYTHING})
    shared, own = module.summary.splitlines()
    assert "per run of prefill" in shared and "decode" not in shared
    assert own.endswith(" (of decode alone)") and "prefill" not in own
