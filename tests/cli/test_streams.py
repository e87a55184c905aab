"""Pipes that nobody reads, and streams that are closed from the start: a quiet end, and nothing written elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.exit_codes import NOBODY_READS
from tests.cli.conftest import write_metadata
from tests.runtime.programs import a_program


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_metadata(tmp_path / "model.pt2", a_program())


def started(shell: str, path: Path, stdout: int = subprocess.PIPE) -> tuple[int, str, str]:
    """In a shell of its own, which closes what the test wants closed. $P is the command, $F the file."""
    environment = {**os.environ, "P": f"{sys.executable} -m penstock", "F": str(path)}
    # Whoever has this set has no buffer that is written at exit.
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(["bash", "-c", shell], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)
    return done.returncode, done.stdout or "", done.stderr


@pytest.fixture
def unread() -> Iterator[int]:
    """The end to write to of a pipe whose other end is closed already, as behind `| head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        *((command, "") for command in ("inspect $F", "inspect $F --json", "--help", "inspect --help", "--version")),
        *(("inspect $F", closed) for closed in ("2>&1", ">&-", ">&- 2>&-", "<&- >&- 2>&-")),
        ("--help", ">&-"),
    ],
)
def test_a_command_ends_quietly_where_nobody_reads(path: Path, unread: int, command: str, closed: str) -> None:
    assert started(f"$P {command} {closed}", path, unread) == (NOBODY_READS, "", "")


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-"])
def test_a_failure_keeps_its_code(path: Path, unread: int, closed: str) -> None:
    for option in ("", "--json"):
        code, _, said = started(f"$P inspect nowhere.pt2 {option} {closed}", path, unread)
        assert code == 8 and said.count("\n") == (0 if "2>" in closed else 1)


def test_a_closed_stderr_hides_messages_and_no_more(path: Path) -> None:
    code, out, _ = started("$P inspect $F --json 2>&-", path)
    assert code == 0 and json.loads(out)["kind"] == "pt2"
    code, out, _ = started("$P inspect nowhere.pt2 --json 2>&-", path)
    assert code == 8 and json.loads(out)["error"]["exit_code"] == 8
    assert started("$P inspect nowhere.pt2 2>&-", path) == (8, "", "")


def test_a_full_disk_is_said(path: Path) -> None:
    for option in ("", "--json", "--schedule"):
        for variable in ("", "PYTHONUNBUFFERED=1"):
            code, _, err = started(f"{variable} $P inspect $F {option} > /dev/full", path)
            assert code == 9 and "stdout" in err and "Traceback" not in err and "Exception ignored" not in err


def test_no_file_takes_the_number_of_a_closed_stream(path: Path, tmp_path: Path) -> None:
    """With a hole at 1, the file that is opened next would be what everybody prints into."""
    before = path.read_bytes()
    code = (
        "import os, sys\n"
        "from penstock.cli.streams import standard_streams\n"
        "with standard_streams():\n"
        "    number = os.open(sys.argv[1], os.O_RDWR)\n"
        "    assert number > 2, number\n"
        "    os.write(2, b'text')\n"
    )
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "$CODE" $F <&- >&- 2>&-'],
        env={**os.environ, "CODE": code, "F": str(path)},
    )
    assert done.returncode == 0 and path.read_bytes() == before


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
@pytest.mark.parametrize(
    "command", ["inspect {}.pt2", "inspect {}.pte", "inspect {}.ptd", "plan {}.pt2 --budget 1", "verify {}.pt2"]
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, command: str, kind: str) -> None:
    for suffix in (".pt2", ".pte", ".ptd"):
        place = tmp_path / f"x{suffix}"
        if kind == "fifo":
            os.mkfifo(place)
        elif kind == "folder":
            place.mkdir()
        else:
            place.symlink_to("/dev/zero")
    from penstock.cli.main import main

    assert main(command.format(tmp_path / "x").split()) == (7 if ".ptd" in command else 8)


@pytest.mark.parametrize("option", ["--out", "--trace", "--write-step-times"])
def test_a_device_is_not_replaced_by_a_file(tmp_path: Path, option: str) -> None:
    from penstock.cli.main import main

    target = tmp_path / "null.pt"
    target.symlink_to("/dev/null")
    (tmp_path / "in.pt").touch()
    arguments = ["run", str(tmp_path / "m.pt2"), "--inputs", str(tmp_path / "in.pt"), option, str(target)]
    assert main(arguments) == 9
    assert target.is_symlink()
