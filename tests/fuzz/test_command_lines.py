"""A slice of the command lines at random, the same each time; and that the harness sees what it looks for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from tests.fuzz import command_lines
from tests.fuzz.command_lines import run_one

LINES = 240


@pytest.mark.parametrize("part", range(4))
def test_a_slice(part: int) -> None:
    for number in range(part, LINES, 4):
        run_one(random.Random(f"command lines {number}"))


def test_files_that_are_called_readable_are_read(capfd: pytest.CaptureFixture[str]) -> None:
    """What a refusal ends at once leads nowhere: most lines must get past the reading."""
    subjects = command_lines._subjects()
    inspected = [path for path in subjects.iterdir() if path.suffix in (".pt2", ".pte", ".ptd")]
    readable = sorted(path for path in inspected if path.name.startswith(command_lines._READABLE))
    wanted = ["baked.pt2", "hostile.pt2", "hostile.ptd", "sound.pt2", "sound.ptd", "sound.pte"]
    assert [path.name for path in readable] == wanted
    for path in readable:
        assert main(["inspect", str(path)]) == 0, capfd.readouterr().err
    for name in ("surrogate.pt2", "other.pt2"):
        assert main(["inspect", str(subjects / name)]) == 8, capfd.readouterr().out


def _fails(monkeypatch: pytest.MonkeyPatch, line: list[str], target: str, broken: Callable[..., Any]) -> str:
    subject = str(command_lines._subjects() / "hostile.pt2")
    line = [subject if word == "PROGRAM" else word for word in line]
    monkeypatch.setattr(command_lines, "command_line", lambda rng, subjects, here: (line, set()))
    run_one(random.Random(0))
    monkeypatch.setattr(target, broken)
    with pytest.raises(AssertionError) as caught:
        run_one(random.Random(0))
    return str(caught.value)


def _raise(*arguments: Any) -> None:
    raise KeyError("floor")


def _leave_a_file(*arguments: Any) -> None:
    Path("left.tmp").touch()


@pytest.mark.parametrize(
    ("line", "target", "broken", "said"),
    [
        (["inspect", "PROGRAM"], "penstock.cli.output.printable", lambda text: text, "in the output"),
        (["inspect", "PROGRAM"], "penstock.cli.program_report.program_report", _raise, "internal error"),
        (["inspect", "PROGRAM", "--json"], "penstock.cli.output.json.dumps", lambda *a, **k: "{} {}", "Extra data"),
        (["inspect", "PROGRAM", "--json"], "penstock.cli.output.json.dumps", lambda *a, **k: "NaN", "is not JSON"),
        (["inspect", "nowhere.pt2"], "penstock.cli.main.exit_code", lambda error: 99, "docs/cli.md"),
        (["inspect", "PROGRAM"], "penstock.cli.main.flush_stdout", _leave_a_file, "left.tmp"),
    ],
)
def test_it_sees_faults(
    monkeypatch: pytest.MonkeyPatch, line: list[str], target: str, broken: Callable[..., Any], said: str
) -> None:
    assert said in _fails(monkeypatch, line, target, broken)
