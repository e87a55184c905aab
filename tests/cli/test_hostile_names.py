"""Names out of files are shown literally: no control character of theirs reaches the output, no markup is obeyed."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.program import Program, read_program
from penstock.schedule import Access, Schedule, Step
from penstock.weight import State, Weight
from penstock.weights.index import read_index
from tests.cli.conftest import Cli, Outcome, write_metadata
from tests.runtime.programs import a_method, a_program

# What a terminal acts upon: C0 but the newline, DEL, C1, and what turns the reading order around; or does not take.
ACTED_UPON = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NAMES = {
    "title": "\x1b]0;owned\x07",
    "colour": "\x1b[31mred",
    "C1": "\x9b2J",
    "backspace": "good\b\b\b\bevil",
    "line": "one\r\ntwo",
    "DEL": "\x7f",
    "override": "\u202eevil",
    "surrogate": "\ud800",
    "markup": "[red]x[/red]",
    "link": "[link=file:///etc/passwd]x[/link]",
    "unbalanced": "[/]",
    "emoji": ":smile:",
    "wide": "重み",
}


def hostile(name: str) -> Program:
    weights = [Weight(name, "uint8", (4096,), (0,), aliases=(f"{name} too",)), Weight("plain", "uint8", (8192,), (0,))]
    accesses = (Access(0, name), Access(1, "plain"))
    schedule = Schedule("forward", accesses, (Step(f"kernel {name}", (0,)), Step("end", (1,))))
    states = (State(f"{name} state", "float32", (2,), (0,), "zeros"),)
    method = dataclasses.replace(a_method(), schedule=schedule, states=(f"{name} state",))
    made = a_program([method], weights, states)
    built_with = {**made.built_with, "torch": f"{name} 1"}
    return dataclasses.replace(
        made, floor_bytes=12288, unused=(f"{name} unused",), built_with=built_with, identity=f"{name} identity"
    )


def shown(name: str) -> str:
    """As a table has it: a name of several columns may be folded."""
    return re.sub(r"\s", "", ACTED_UPON.sub(_escaped, name.replace("\n", "\\x0a")))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


def check_text(told: Outcome, code: int, name: str) -> None:
    assert told.code == code, told.stderr
    assert not ACTED_UPON.search(told.stdout) and not ACTED_UPON.search(told.stderr)
    text = re.sub(r"\s", "", told.stdout + told.stderr)
    # Quoted in a message it may stand there as Python writes it.
    assert shown(name) in text or shown(repr(name)[1:-1]) in text


def check_json(told: Outcome, code: int) -> dict[str, Any]:
    assert told.code == code, told.stderr
    assert told.stdout.isascii() and not ACTED_UPON.search(told.stdout)
    return told.document


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


def test_inspect(cli: Cli, tmp_path: Path, name: str) -> None:
    path = write_metadata(tmp_path / "m.pt2", hostile(name))
    check_text(cli("inspect", path, "--schedule"), 0, name)
    told = check_json(cli("inspect", path, "--json"), 0)
    wanted = "\\ud800" if name == "\ud800" else name
    assert told["weights"][0]["name"] == wanted and told["weights"][0]["aliases"] == [f"{wanted} too"]
    assert told["methods"][0]["steps"][0]["kernel"] == f"kernel {wanted}" and told["unused"] == [f"{wanted} unused"]


def test_plan(cli: Cli, tmp_path: Path, name: str) -> None:
    path = write_metadata(tmp_path / "m.pt2", hostile(name))
    curve = tmp_path / "c.html"
    check_text(cli("plan", path, "--budget", "1GB", "--link", "1GB/s", "--curve", curve, "--points", "2"), 0, name)
    assert not ACTED_UPON.search(curve.read_text())
    check_json(cli("plan", path, "--budget", "1GB", "--json"), 0)
    refused = cli("plan", path, "--budget", "1GB", "--method", name)
    check_text(refused, 2, name)


def test_verify(cli: Cli, tmp_path: Path, program: Path, name: str) -> None:
    path = write_metadata(tmp_path / "m.pt2", hostile(name))
    shutil.copy(program.with_suffix(".ptd"), tmp_path / "m.ptd")
    # The file lacks the weight, which is named.
    check_text(cli("verify", path), 1, name)
    check_json(cli("verify", path, "--json"), 1)


def test_run(cli: Cli, tmp_path: Path, program: Path, name: str) -> None:
    torch.save({name: torch.ones(1)}, tmp_path / "in.pt")
    options = ("run", program, "--budget", "1GB", "--inputs", tmp_path / "in.pt")
    if name != "\ud800":  # no name of a file of torch's
        check_text(cli(*options), 12, name)
        check_json(cli(*options, "--json"), 12)
    path = write_metadata(tmp_path / "m.pt2", hostile(name))
    shutil.copy(program.with_suffix(".ptd"), tmp_path / "m.ptd")
    refused = cli("run", path, "--budget", "1GB", "--inputs", tmp_path / "in.pt")
    assert refused.code not in (0, 70) and not ACTED_UPON.search(refused.stderr)


def test_weights(cli: Cli, tmp_path: Path, program: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in a .ptd, as its reader hands them over."""
    index = read_index(program.with_suffix(".ptd"))
    entries = tuple(dataclasses.replace(entry, name=f"{name} {number}") for number, entry in enumerate(index.entries))
    monkeypatch.setattr("penstock.weights.index.read_index", lambda path: dataclasses.replace(index, entries=entries))
    check_text(cli("inspect", program.with_suffix(".ptd")), 0, name)
    check_json(cli("inspect", program.with_suffix(".ptd"), "--json"), 0)


@pytest.mark.parametrize("name", ["\x1b[31m.pt2", "a\nb.pt2", "\udcff.pt2", "[red]x.pt2", "\u202e.pt2"], ids=ascii)
def test_paths(cli: Cli, tmp_path: Path, program: Path, name: str) -> None:
    path = tmp_path / name
    check_text(cli("inspect", path), 8, name)
    check_json(cli("inspect", path, "--json"), 8)
    shutil.copy(program, path)
    code = 8 if "\udcff" in name else 0  # torch takes none that is not UTF-8
    for command in (("inspect", path), ("plan", path, "--budget", "1GB")):
        told = cli(*command)
        assert told.code == code and not ACTED_UPON.search(told.stdout + told.stderr)
        check_json(cli(*command, "--json"), code)


def test_the_name_of_a_program_is_no_markup_of_a_page(cli: Cli, tmp_path: Path, program: Path) -> None:
    path = tmp_path / "<script>alert(1)<script>.pt2"
    shutil.copy(program, path)
    assert cli("plan", path, "--link", "1GB/s", "--curve", tmp_path / "c.html", "--points", "2").code == 0
    assert "<script>alert(1)" not in (tmp_path / "c.html").read_text()


def test_a_name_that_the_encoding_lacks_is_escaped(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    path = write_metadata(tmp_path / "m.pt2", hostile(NAMES["wide"]))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    from penstock.cli.main import main

    assert main(["inspect", str(path)]) == 0
    assert sys.stdout.errors == "strict", "as it was"
    assert b"\\u91cd\\u307f" in raw.getvalue()


def test_the_programs_are_as_read(tmp_path: Path) -> None:
    """These names survive the file, so that the tests above are about them."""
    for name in NAMES.values():
        read = read_program(write_metadata(tmp_path / "m.pt2", hostile(name)))
        assert read.weights[0].name == name
        json.dumps(name)
