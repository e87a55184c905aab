"""Names out of files are shown literally: no control character of theirs reaches the output, no markup is obeyed."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import PackageError
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
    "markup": "[red]x[/red]",
    "link": "[link=file:///etc/passwd]x[/link]",
    "unbalanced": "[/]",
    "emoji": ":smile:",
    "wide": "重み",
}
# JSON can spell it, and no description may hold it: nothing encodes it.
SURROGATE = "\ud800"


def hostile(name: str) -> Program:
    weights = [Weight(name, "uint8", (4096,), (0,), aliases=(f"{name} too",)), Weight("plain", "uint8", (8192,), (0,))]
    accesses = (Access(0, name), Access(1, "plain"))
    schedule = Schedule("forward", accesses, (Step(f"kernel {name}", (0,)), Step("end", (1,))))
    states = (State(f"{name} state", "float32", (2,), (0,), "zeros"),)
    method = dataclasses.replace(a_method(), schedule=schedule, states=(f"{name} state",))
    made = a_program([method], weights, states)
    built_with = {**made.built_with, "torch": f"{name} 1"}
    return dataclasses.replace(made, floor_bytes=12288, unused=(f"{name} unused",), built_with=built_with)


def shown(name: str) -> str:
    """As a table has it: a name of several columns may be folded."""
    return re.sub(r"\s", "", ACTED_UPON.sub(_escaped, name.replace("\n", "\\x0a")))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


def check_text(told: Outcome, code: int, name: str) -> None:
    assert told.code == code, told.stderr
    assert not ACTED_UPON.search(told.stdout) and not ACTED_UPON.search(told.stderr)
    assert is_named(told.stdout + told.stderr, name)


def is_named(text: str, name: str) -> bool:
    # Quoted in a message it may stand there as Python writes it: before it was escaped, or after.
    text = re.sub(r"\s", "", text).replace("\\\\", "\\")
    return shown(name) in text or shown(repr(name)[1:-1]) in text


def check_json(told: Outcome, code: int) -> dict[str, Any]:
    assert told.code == code, told.stderr
    assert told.stdout.isascii() and not ACTED_UPON.search(told.stdout)
    assert not ACTED_UPON.search(told.stderr)
    return told.document


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


@pytest.fixture(params=[*NAMES, "surrogate"])
def any_name(request: pytest.FixtureRequest) -> str:
    return {**NAMES, "surrogate": SURROGATE}[request.param]


def test_inspect(cli: Cli, tmp_path: Path, name: str) -> None:
    path = write_metadata(tmp_path / "m.pt2", hostile(name))
    check_text(cli("inspect", path, "--schedule"), 0, name)
    told = check_json(cli("inspect", path, "--json"), 0)
    assert told["weights"][0]["name"] == name and told["weights"][0]["aliases"] == [f"{name} too"]
    assert told["methods"][0]["steps"][0]["kernel"] == f"kernel {name}" and told["unused"] == [f"{name} unused"]


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


# The commands that read a description, and what they need beside it.
READERS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "plan": ("--budget", "1GB"),
    "verify": (),
    "run": ("--budget", "1GB", "--inputs", "in.pt"),
}
# Text of a description that no rule binds to other text, and its text as a whole.
PLACES: dict[str, Callable[[Program, str], Program]] = {
    "identity": lambda made, text: dataclasses.replace(made, identity=f"{text} identity"),
    "unused": lambda made, text: dataclasses.replace(made, unused=("plain name", f"{text} unused")),
    "build": lambda made, text: dataclasses.replace(made, built_with={**made.built_with, "torch": f"{text} 1"}),
    "key": lambda made, text: dataclasses.replace(made, built_with={**made.built_with, f"{text} key": "1"}),
    "anywhere": lambda made, text: hostile(text),
}


@pytest.fixture
def refused(cli: Cli, tmp_path: Path, program: Path) -> Callable[[str, Program, str], None]:
    """Checks that a command refuses the description as damaged, and that what is wrong in it is shown literally."""

    def check(command: str, made: Program, text: str) -> None:
        path = write_metadata(tmp_path / "m.pt2", made)
        shutil.copy(program.with_suffix(".ptd"), tmp_path / "m.ptd")
        torch.save({"x": torch.ones(1)}, tmp_path / "in.pt")
        options = [tmp_path / "in.pt" if word == "in.pt" else word for word in READERS[command]]
        told = cli(command, path, *options)
        check_text(told, 8, text)
        assert told.stdout == "" and told.stderr.count("\n") == 1 and "PackageError" in told.stderr
        error = check_json(cli(command, path, *options, "--json"), 8)["error"]
        assert error["class"] == "PackageError" and error["exit_code"] == 8
        assert not ACTED_UPON.search(error["message"]) and is_named(error["message"], text)

    return check


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", READERS)
def test_a_lone_surrogate_is_refused(refused: Callable[[str, Program, str], None], command: str, place: str) -> None:
    """Half a surrogate pair: wherever it stands, it is told, and what is told can be encoded."""
    refused(command, PLACES[place](hostile("plain name"), SURROGATE), SURROGATE)


@pytest.mark.parametrize("command", READERS)
def test_an_identity_of_another_layout_is_refused(
    refused: Callable[[str, Program, str], None], command: str, name: str
) -> None:
    refused(command, PLACES["identity"](hostile(name), name), f"{name} identity")


def test_a_lone_surrogate_as_an_argument(cli: Cli, program: Path) -> None:
    options = ("plan", program, "--budget", "1GB", "--method", SURROGATE)
    check_text(cli(*options), 2, SURROGATE)
    check_json(cli(*options, "--json"), 2)


def test_run(cli: Cli, tmp_path: Path, program: Path, name: str) -> None:
    torch.save({name: torch.ones(1)}, tmp_path / "in.pt")
    options = ("run", program, "--budget", "1GB", "--inputs", tmp_path / "in.pt")
    check_text(cli(*options), 12, name)
    check_json(cli(*options, "--json"), 12)
    path = write_metadata(tmp_path / "m.pt2", hostile(name))
    shutil.copy(program.with_suffix(".ptd"), tmp_path / "m.ptd")
    refused = cli("run", path, "--budget", "1GB", "--inputs", tmp_path / "in.pt")
    assert refused.code not in (0, 70) and not ACTED_UPON.search(refused.stderr)


def test_weights(cli: Cli, tmp_path: Path, program: Path, any_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in a .ptd, as its reader hands them over."""
    index = read_index(program.with_suffix(".ptd"))
    entries = tuple(
        dataclasses.replace(entry, name=f"{any_name} {number}") for number, entry in enumerate(index.entries)
    )
    monkeypatch.setattr("penstock.weights.index.read_index", lambda path: dataclasses.replace(index, entries=entries))
    check_text(cli("inspect", program.with_suffix(".ptd")), 0, any_name)
    told = check_json(cli("inspect", program.with_suffix(".ptd"), "--json"), 0)
    wanted = "\\ud800" if any_name == SURROGATE else any_name
    assert told["entries"][0]["name"] == f"{wanted} 0"


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
    with pytest.raises(PackageError, match=r"\\ud800', needs text that UTF-8 can hold"):
        read_program(write_metadata(tmp_path / "m.pt2", hostile(SURROGATE)))
