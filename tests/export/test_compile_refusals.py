"""What penstock.compile refuses: with a clear error, before the compiler runs, and with no file written or touched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.exc import CppCompileError
from torch._inductor.lowering import register_lowering
from torch._inductor.scheduler import Scheduler

import penstock
import penstock.export.compile as compile_module
import penstock.export.method as method_module
from penstock.errors import (
    BudgetError,
    CheckpointError,
    CompileError,
    DeviceError,
    NotAProgramError,
    NotOffloadedError,
    NoWeightsError,
    OutputExistsError,
    OutputPathError,
    PenstockError,
    ProgramError,
    ToolchainError,
    TrainingGraphError,
    WeightsFileError,
)
from penstock.export import toolchain
from penstock.export.method import schedule_method
from penstock.export.offload import insert_program_fetches
from penstock.torch_private.inductor import REQUIRED_OPTIONS
from tests.export.builds import build, older_files, unchanged
from tests.harness import offloaded

# --------------------------------------------------------------------------------------------------------------- input


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))


def training_program() -> torch.export.ExportedProgram:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    ep = torch.export.export(model, (torch.ones(1, 2),)).run_decompositions({})
    insert_program_fetches(ep)  # what apply_weight_offload does after it has refused such a program
    return ep


@pytest.mark.parametrize(
    ("programs", "error", "message"),
    [
        (lambda p: nn.Linear(2, 2), NotAProgramError, r"got Linear; call torch\.export\.export"),
        (lambda p: "model.pt2", NotAProgramError, "got str"),
        (lambda p: None, NotAProgramError, "got NoneType"),
        (lambda p: [p], NotAProgramError, "got list"),
        (lambda p: {"forward": nn.Linear(2, 2)}, NotAProgramError, "got Linear"),
        (lambda p: {"good": p, "bad": 5}, NotAProgramError, "got int"),
        (lambda p: exported(), NotOffloadedError, r"method 'forward' did not go through penstock\.app"),
        (lambda p: {"good": p, "raw": exported()}, NotOffloadedError, "method 'raw'"),
        (lambda p: torch.export.export(nn.ReLU(), (torch.ones(2),)), NotOffloadedError, "method 'forward'"),
        (lambda p: training_program(), TrainingGraphError, "runs in training mode; call model.eval"),
        (lambda p: {}, ProgramError, "no program was given"),
        *(
            (lambda p, name=name: {name: p}, ProgramError, re.escape(f"{name!r} is not a method name"))
            for name in ("", "1st", "a b", "a.b", "a/b", "../up", "é", "run\n", 5, None, ("a",))
        ),
    ],
)
def test_what_is_no_program_is_refused(
    no_compiler: None,
    tmp_path: Path,
    program: torch.export.ExportedProgram,
    programs: Callable[[Any], Any],
    error: type[PenstockError],
    message: str,
) -> None:
    bad = programs(program)
    with unchanged(tmp_path), pytest.raises(error, match=message):
        build(bad, tmp_path)
    older_files(tmp_path)
    with unchanged(tmp_path), pytest.raises(error, match=message):
        build(bad, tmp_path, overwrite=True)


class Named(nn.Module):
    """Has a weight of the name under which a .ptd keeps its own metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.penstock = nn.Module()
        self.penstock.json = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.penstock.json


def test_a_weight_of_a_name_that_the_file_needs(quick: None, tmp_path: Path, temporary: Path) -> None:
    with unchanged(tmp_path), pytest.raises(WeightsFileError, match=r"'penstock\.json' is the name of the file's own"):
        build(offloaded(Named(), (torch.ones(2),)), tmp_path)


def test_a_program_without_weights_never_gets_here() -> None:
    with pytest.raises(NoWeightsError, match="reads no weight"):
        penstock.apply_weight_offload(torch.export.export(nn.ReLU(), (torch.ones(2),)))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "'tpu'"),
        ("", "'' is not a device"),
        ("meta", "cannot compile for 'meta'; valid targets are 'cpu' and 'cuda'"),
        (torch.device("meta"), "cannot compile for 'meta'"),
        ("mps", "cannot compile for 'mps'"),
        ("cuda:x", "'cuda:x' is not a device"),
        (3.5, "3.5 is not a device"),
        (["cpu"], "is not a device"),
        ("cuda", "torch sees no GPU"),
        ("cuda:0", "torch sees no GPU"),
    ],
)
def test_what_is_no_device_is_refused(
    no_compiler: None,
    tmp_path: Path,
    program: torch.export.ExportedProgram,
    monkeypatch: pytest.MonkeyPatch,
    device: Any,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with unchanged(tmp_path), pytest.raises(DeviceError, match=message):
        build(program, tmp_path, device=device)


@pytest.mark.parametrize("device", ["cuda:9", torch.device("cuda", 9), "cuda:2"])
def test_a_gpu_that_is_not_there(
    no_compiler: None,
    tmp_path: Path,
    program: torch.export.ExportedProgram,
    monkeypatch: pytest.MonkeyPatch,
    device: Any,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with unchanged(tmp_path), pytest.raises(DeviceError, match=r"there is no device cuda:[92]; torch sees 2"):
        build(program, tmp_path, device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_target_is_a_kind_of_device(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, device: Any
) -> None:
    assert build(program, tmp_path, device=device).program.device == "cpu"


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("model", OutputPathError, "model must end in .pt2"),
        ("model.pt", OutputPathError, "model.pt must end in .pt2"),
        ("model.PT2", OutputPathError, "must end in .pt2"),
        ("model.ptd", OutputPathError, "must end in .pt2"),
        (".pt2", OutputPathError, "must end in .pt2"),
        ("", OutputPathError, "must end in .pt2"),
        ("nowhere/model.pt2", OutputPathError, "nowhere does not exist"),
        ("file/model.pt2", OutputPathError, "file does not exist"),
        ("program.pt2", OutputExistsError, r"program\.pt2 exists; pass overwrite=True"),
        ("weights.pt2", OutputExistsError, r"weights\.ptd exists; pass overwrite=True"),
        ("both.pt2", OutputExistsError, r"both\.pt2 and \S*both\.ptd exist"),
        ("folder.pt2", OutputExistsError, r"folder\.pt2 exist"),
    ],
)
def test_a_place_that_cannot_be_written_to(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, path: str, error: type, message: str
) -> None:
    for name in ("file", "program.pt2", "weights.ptd", "both.pt2", "both.ptd"):
        (tmp_path / name).write_text("older")
    (tmp_path / "folder.pt2").mkdir()
    with unchanged(tmp_path), pytest.raises(error, match=message):
        penstock.compile(program, os.path.join(tmp_path, path) if path else path, device="cpu")  # noqa: PTH118


@pytest.mark.parametrize("path", [None, 5, b"model.pt2", ["model.pt2"]])
def test_what_is_no_path(no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, path: Any) -> None:
    with pytest.raises(OutputPathError, match=re.escape(f"{path!r} is not a path")):
        penstock.compile(program, path, device="cpu")


@pytest.mark.parametrize("name", ["model.pt2", "model.ptd"])
def test_a_folder_in_the_place_of_a_file(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, name: str
) -> None:
    older_files(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with unchanged(tmp_path), pytest.raises(OutputPathError, match=rf"{name} cannot be replaced: a folder"):
        build(program, tmp_path, overwrite=True)


def test_a_folder_that_is_read_only(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root may
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(OutputPathError, match=f"{tmp_path} cannot be written to"):
        build(program, tmp_path)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("budget", ["8 gigs", "", -1, 1.5, True, 2**63, "1.1B"])
def test_a_budget_that_is_none(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, budget: Any
) -> None:
    with unchanged(tmp_path), pytest.raises(BudgetError):
        build(program, tmp_path, weight_offload_budget=budget)


@pytest.mark.parametrize("weights", ["/nowhere", 5, [], {"linear.weight": None}])
def test_weights_that_are_none(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, weights: Any
) -> None:
    with unchanged(tmp_path), pytest.raises(CheckpointError):
        build(program, tmp_path, weights=weights)


@pytest.mark.parametrize("name", REQUIRED_OPTIONS)
def test_options_that_are_ours(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, name: str
) -> None:
    with unchanged(tmp_path), pytest.raises(CompileError, match=f"'{re.escape(name)}' is set by penstock"):
        build(program, tmp_path, inductor_configs={"max_autotune": False, name: False})


@pytest.mark.parametrize("name", ["nonsense", "cpp.nonsense", "nonsense.cpp", "", "max_autotune.x", 5, None])
def test_options_that_nobody_has(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, name: Any
) -> None:
    with unchanged(tmp_path), pytest.raises(CompileError, match=re.escape(f"has no option {name!r}")):
        build(program, tmp_path, inductor_configs={name: False})


# ------------------------------------------------------------------------------------------------ compilers that fail


@torch.library.custom_op("penstock_tests::unlowered", mutates_args=())
def unlowered(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unlowered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@register_lowering(torch.ops.penstock_tests.unlowered.default, type_promotion_kind=None)
def _lower(x: Any) -> Any:
    raise NotImplementedError("nobody lowers this")


class Lowered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Unlowered(Lowered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unlowered(super().forward(x))


def causes(error: BaseException) -> list[str]:
    found = []
    current: BaseException | None = error
    while current is not None:
        found.append(f"{type(current).__name__}: {current}")
        current = current.__cause__ or current.__context__
    return found


def test_the_cpp_compiler_s_own_words_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not its command, with all it includes, which alone fills a screen."""
    output = "In file included from a.h:8,\n/x.cpp:3:1: error: 'f' was not declared\n   3 | f();\n" * 3

    def fail(*_: object) -> list[str]:
        raise CppCompileError(["g++", "-I/one", "-I/two", "/x.cpp"], output)

    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)
    monkeypatch.setattr(method_module, "compile_graph", fail)
    with pytest.raises(CompileError) as caught:
        build({"bad": offloaded(Lowered(), (torch.ones(1, 4),))}, tmp_path)
    assert str(caught.value).endswith("CppCompileError: C++ compile error | error: 'f' was not declared")


def test_an_op_that_the_compiler_cannot_compile(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)
    out = tmp_path / "out"
    out.mkdir()
    older_files(out)
    bad = offloaded(Unlowered(), (torch.ones(1, 4),))
    codegen, enter_context = Scheduler.codegen, Scheduler.enter_context
    with unchanged(out), pytest.raises(CompileError, match="method 'bad': Inductor could not compile it: ") as caught:
        build({"bad": bad}, out, overwrite=True)
    assert "nobody lowers this" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert any(text.startswith("NotImplementedError: nobody lowers this") for text in causes(caught.value))
    assert list(temporary.glob("penstock-*")) == []
    # The compiler is as it was, and the next program compiles.
    assert (Scheduler.codegen, Scheduler.enter_context) == (codegen, enter_context)
    good = offloaded(Lowered(), (torch.ones(1, 4),))
    names = {"linear.weight": "linear.weight", "linear.bias": "linear.bias"}
    method = schedule_method("good", good, torch.device("cpu"), frozenset(), names)
    assert {access.weight for access in method.schedule.accesses} == names.keys()


def test_no_c_plus_plus_compiler(tmp_path: Path) -> None:
    """In a process of its own: Inductor reads CXX once, when it is imported."""
    code = (
        "import sys, torch, penstock\n"
        "ep = torch.export.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),))\n"
        "penstock.compile(penstock.apply_weight_offload(ep), sys.argv[1], device='cpu', overwrite=True)\n"
    )
    older_files(tmp_path)
    env = {**os.environ, "CXX": "/bin/false", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "model.pt2")]
    with unchanged(tmp_path):
        child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "penstock.errors.ToolchainError: no C++ compiler" in child.stderr
    assert "CXX is '/bin/false'" in child.stderr
    assert "EXPORT_" not in child.stdout


def test_a_c_plus_plus_compiler_that_is_unusable(
    tmp_path: Path, temporary: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "compiler 1.0"; exit 0; fi\nexec false\n')
    script.chmod(0o755)
    monkeypatch.setattr(toolchain, "_checked", {})
    monkeypatch.setattr(toolchain, "cpp_compiler", lambda: str(script))
    with unchanged(tmp_path), pytest.raises(ToolchainError, match=re.escape(f"{script} cannot build")) as caught:
        build(program, tmp_path)
    assert isinstance(caught.value, CompileError)


def test_a_compiler_that_gives_no_wrapper_or_two(
    tmp_path: Path, temporary: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)
    for files in ([], ["kernel.cpp"], ["a.wrapper.cpp", "b.wrapper.cpp"]):
        monkeypatch.setattr(method_module, "compile_graph", lambda *args, files=files: files)
        with unchanged(tmp_path), pytest.raises(CompileError):
            build(program, tmp_path)
