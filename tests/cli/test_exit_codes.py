"""Codes, their table in the docs, and that a failure is a document with --json."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock.cli.main as main_file
from penstock import errors
from penstock.cli.exit_codes import FAILED, FAMILIES, INTERNAL, INTERRUPTED, MEANINGS, USAGE, exit_code
from penstock.errors import PenstockError
from tests.cli.conftest import Cli

DOCS = Path(__file__).parents[2] / "docs/cli.md"

EXPECTED: dict[type[BaseException], int] = {
    errors.NoWeightsError: 3,
    errors.ToolchainError: 4,
    errors.WeightEscapesError: 4,
    errors.DeviceError: 5,
    errors.CheckpointError: 6,
    errors.ChecksumError: 7,
    errors.MissingWeightError: 7,
    errors.PackageError: 8,
    errors.DiskFullError: 9,
    errors.OutputExistsError: 9,
    errors.BudgetError: 10,
    errors.HostMemoryError: 11,
    errors.BuildMismatchError: 11,
    errors.InputError: 12,
    errors.NotCopyableError: 11,
    errors.UntestedTorchError: 4,
    errors.PlanError: INTERNAL,
    errors.PeakMemoryError: FAILED,
    PenstockError: FAILED,
    PermissionError: FAILED,
    MemoryError: FAILED,
    ZeroDivisionError: INTERNAL,
    SystemExit: INTERNAL,
    KeyboardInterrupt: INTERRUPTED,
}


def test_the_docs_have_this_table() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]*) \|$", DOCS.read_text(), flags=re.MULTILINE)
    named = {family.code: ", ".join(f"`{one.__name__}`" for one in family.classes) for family in FAMILIES[:-1]}
    assert [(int(code), meaning.strip(), classes.strip()) for code, meaning, classes in rows] == [
        (code, MEANINGS[code], named.get(code, "")) for code in sorted(MEANINGS)
    ]


@pytest.mark.parametrize(("kind", "code"), EXPECTED.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_family(kind: type[BaseException], code: int) -> None:
    assert exit_code(kind.__new__(kind)) == code


def test_every_family_of_errors_py_has_a_code_of_its_own() -> None:
    """A new direct child of PenstockError must be put into a family on purpose."""
    fallback = {errors.PeakMemoryError}
    for kind in PenstockError.__subclasses__():
        if kind.__module__ == errors.__name__ and kind not in fallback:
            assert exit_code(kind.__new__(kind)) not in (FAILED, USAGE), kind


@pytest.mark.parametrize(
    "error", [errors.DeviceError("no such thing"), ZeroDivisionError("of ours"), PermissionError("no"), SystemExit(0)]
)
def test_a_failure_is_a_document(cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr("penstock.cli.subject.read_subject", fail)
    plain = cli("inspect", "model.pt2")
    assert (plain.code, plain.stdout) == (exit_code(error), "")
    assert str(error) in plain.stderr and plain.stderr.count("\n") == 1, "one line, and no traceback"
    told = cli("inspect", "model.pt2", "--json")
    assert told.code == plain.code
    assert told.document == {
        "error": {"class": type(error).__name__, "message": str(error), "exit_code": exit_code(error)}
    }


def test_usage(cli: Cli) -> None:
    wrong = cli("inspect", "--no-such-option", "--json")
    assert wrong.code == USAGE and wrong.document["error"]["exit_code"] == USAGE
    assert cli("no-such-command").code == USAGE
    assert cli().code == USAGE


@pytest.mark.parametrize("command", sorted(main_file.penstock.commands))
def test_help_has_examples_and_json(cli: Cli, command: str) -> None:
    told = cli(command, "--help")
    assert told.code == 0
    assert f"  penstock {command} " in told.stdout and "--json" in told.stdout


def test_the_traceback_is_there_for_those_who_ask(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise KeyError("floor")

    monkeypatch.setattr("penstock.cli.subject.read_subject", fail)
    quiet = cli("inspect", "model.pt2").stderr
    assert main_file.TRACEBACK_VARIABLE in quiet and "in fail" not in quiet
    monkeypatch.setenv(main_file.TRACEBACK_VARIABLE, "1")
    loud = cli("inspect", "model.pt2")
    assert "in fail" in loud.stderr and loud.code == INTERNAL
    assert loud.stderr.splitlines()[-1] == quiet.strip()


def test_a_plan_that_its_check_refuses_is_a_fault_of_penstock(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise errors.PlanError("the plan takes 2 bytes of a budget of 1")

    monkeypatch.setattr("penstock.cli.subject.read_subject", fail)
    told = cli("inspect", "model.pt2").stderr
    assert (
        told.startswith("penstock: internal error: PlanError: the plan takes 2 bytes") and "a fault of Penstock" in told
    )


@pytest.mark.parametrize("argument", ["a\0b.pt2", "\0"])
def test_a_nul_is_no_argument(cli: Cli, argument: str) -> None:
    told = cli("inspect", argument, "--json")
    assert told.code == USAGE and "NUL" in told.document["error"]["message"] and "\0" not in told.stderr
