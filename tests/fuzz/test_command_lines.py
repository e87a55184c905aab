"""A slice of the command lines at random, the same each time; and that the harness sees what it looks for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import command_lines
from tests.fuzz.command_lines import run_one

LINES = 240


@pytest.mark.parametrize("part", range(4))
def test_a_slice(part: int) -> None:
    for number in range(part, LINES, 4):
        run_one(random.Random(f"command lines {number}"))


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
        (["inspect", "PROGRAM", "--json"], "penstock.cli.output.json.dumps", lambda *a, **k: "NaN", "no JSON"),
        (["inspect", "nowhere.pt2"], "penstock.cli.main.exit_code", lambda error: 99, "docs/cli.md"),
        (["inspect", "PROGRAM"], "penstock.cli.main.flush_stdout", _leave_a_file, "left.tmp"),
    ],
)
def test_it_sees_faults(
    monkeypatch: pytest.MonkeyPatch, line: list[str], target: str, broken: Callable[..., Any], said: str
) -> None:
    assert said in _fails(monkeypatch, line, target, broken)
