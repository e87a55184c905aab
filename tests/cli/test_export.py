"""What export takes and refuses. The program of the other tests is exported by the command as well."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.export import _exported, _function
from penstock.program import read_program
from tests.cli import models
from tests.cli.conftest import Cli

HERE = "tests.cli.models"


def test_the_files(program: Path) -> None:
    read = read_program(program)
    assert [method.name for method in read.methods] == ["forward"] and read.device == "cpu"
    stored = {weight.name: weight.nbytes for weight in read.weights}
    model, _, _ = models.small()
    assert stored == {name: value.nbytes for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["pair", "small", "exported"])
def test_what_a_function_may_return(kind: str) -> None:
    found = _exported(_function(f"{HERE}:{kind}")(), kind)
    assert isinstance(found, torch.export.ExportedProgram)


def test_a_model_is_exported_for_inference() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).train()
    x = torch.ones(2, 4)
    ran = _exported((model, (x,)), "it").module()
    assert torch.equal(ran(x), ran(x)) and torch.equal(ran(x), model[0](x)), "nothing is dropped"


def test_junk_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    told = cli("export", f"{HERE}:junk", "-o", tmp_path / "m.pt2", "--device", "cpu", "--json")
    assert told.code == 3 and told.document["error"]["class"] == "NotAProgramError"
    assert "(Linear, Tensor)" in told.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("broken", "ZeroDivisionError: the user's own mistake"),
        ("leaving", "sys.exit(0)"),
        ("unexportable", "models.py"),
    ],
)
def test_a_mistake_in_the_users_code_is_told_with_its_line(cli: Cli, tmp_path: Path, function: str, said: str) -> None:
    told = cli("export", f"{HERE}:{function}", "-o", tmp_path / "m.pt2", "--device", "cpu", "--json")
    error = told.document["error"]
    assert told.code == 3 and error["class"] == "ProgramError"
    assert said in error["message"] and f"{HERE}:{function}" in error["message"]
    assert "models.py" in error["message"] and "line" in error["message"]
    assert "Traceback (most recent call last)" not in told.stderr
    assert not list(tmp_path.iterdir())


def test_a_module_that_exits_while_it_is_imported(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_model.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    told = cli("export", "leaving_model:f", "-o", tmp_path / "m.pt2", "--device", "cpu")
    assert told.code == 3 and "leaving_model.py, line 1" in told.stderr


def _full(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def _nowhere(*arguments: Any) -> None:
    raise FileNotFoundError(2, "No usable temporary directory found")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mkdtemp", _full, "No space left on device"),
        ("gettempdir", _nowhere, "No usable temporary directory found"),
        ("tempdir", "/nowhere/at/all", "/nowhere/at/all"),
        ("tempdir", __file__, "Not a directory"),
    ],
    ids=["full", "nowhere", "missing", "no folder"],
)
def test_no_place_for_temporary_files(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, said: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, name, value)
        told = cli("export", f"{HERE}:pair", "-o", tmp_path / "m.pt2", "--device", "cpu")
    assert told.code == 9 and "TMPDIR" in told.stderr and said in told.stderr, told.stderr
    assert told.stderr.count("\n") == 1, "refused before anything is exported"
    assert not list(tmp_path.iterdir())


def test_existing_files_stay(cli: Cli, program: Path) -> None:
    before = program.read_bytes()
    told = cli("export", f"{HERE}:broken", "-o", program, "--device", "cpu")
    assert told.code == 9 and "ZeroDivisionError" not in told.stderr, "refused before anything is run"
    assert program.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("no_such_module:f",), 2),
        ((f"{HERE}:no_such_function",), 2),
        (("no-colon",), 2),
        (("..:f",), 2),
        (("a b:f",), 2),
        (("sys:",), 2),
        (("sys:no_such_function",), 2),
        ((), 2),
        (("--method", "decode"), 2),
        ((f"{HERE}:pair", "--method", f"forward={HERE}:pair"), 2),
        ((f"{HERE}:pair", "--budget", "much"), 10),
        ((f"{HERE}:pair", "--device", "tpu"), 5),
    ],
    ids=str,
)
def test_refusals(cli: Cli, tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    device = () if "--device" in options else ("--device", "cpu")
    assert cli("export", *options, *device, "-o", tmp_path / "m.pt2").code == code
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("output", "code"), [("m.onnx", 2), ("no/such/folder/m.pt2", 9)])
def test_outputs(cli: Cli, tmp_path: Path, output: str, code: int) -> None:
    assert cli("export", f"{HERE}:pair", "--device", "cpu", "-o", tmp_path / output).code == code


@pytest.mark.parametrize("kind", ["nowhere", "fifo"])
def test_a_checkpoint_is_looked_at_before_anything_runs(cli: Cli, tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / "fifo")
    options = ("-o", tmp_path / "m.pt2", "--device", "cpu", "--weights", tmp_path / kind)
    told = cli("export", f"{HERE}:broken", *options)
    assert told.code == 6 and kind in told.stderr and "ZeroDivisionError" not in told.stderr


def test_split_linear_where_nothing_can_be_split(cli: Cli, tmp_path: Path) -> None:
    told = cli("export", f"{HERE}:pair", "-o", tmp_path / "m.pt2", "--device", "cpu", "--split-linear", "--json")
    assert told.code == 4 and "no weight of forward can be split" in told.document["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_a_module_that_lacks_something_is_no_usage_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_model.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    told = cli("export", "lacking_model:f", "-o", tmp_path / "m.pt2", "--device", "cpu")
    assert told.code == 3 and "no_such_package" in told.stderr and "lacking_model.py, line 1" in told.stderr


def test_files_that_are_there_are_replaced_by_an_option_of_the_command(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"")
    told = cli("export", "tests.cli.models:small", "-o", tmp_path / "model.pt2", "--json")
    assert told.code == 9 and told.document["error"]["message"].endswith("exists; pass --overwrite to replace")
