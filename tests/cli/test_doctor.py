"""Each line of the doctor passes, warns or fails with a remedy; what may crash or hang does so in a child."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock.cli.doctor_checks as checks
from penstock.cli.children import ChildFailure, ask_child
from penstock.cli.doctor_checks import Doctor, Line
from penstock.errors import RegistrationError
from tests.cli.conftest import Cli

Answer = dict[str, Any] | Exception
GPU = {"version": 13000, "gpus": [{"name": "a GPU", "bytes": 24 << 30, "maps": True}]}
TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "sees": True}
COMPILER = {"torch": TORCH, "compiler": "/usr/bin/g++", "version": "g++ 12"}
LINK = {"bytes_per_s": 55e9}
ALL_WELL: dict[str, Answer] = {"_DRIVER": GPU, "_COMPILER": COMPILER, "_LINK": LINK}

NO_TORCH: dict[str, Answer] = dict.fromkeys(("_TORCH", "_COMPILER"), ChildFailure("No module named 'torch'"))
CRASHING_COMPILER: dict[str, Answer] = {"_COMPILER": ChildFailure("ended by SIGSEGV"), "_TORCH": {"torch": TORCH}}

Examine = Callable[..., dict[str, Line]]


def with_torch(**facts: object) -> dict[str, Any]:
    return {**COMPILER, "torch": {**TORCH, **facts}}


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Examine:
    """The doctor's lines where children answer as told."""

    def lines(registration: Exception | None = None, **answers: Answer) -> dict[str, Line]:
        table = {getattr(checks, name): answer for name, answer in {**ALL_WELL, **answers}.items()}

        def answer(code: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
            found = table.get(code, {})
            if isinstance(found, Exception):
                raise found
            return found

        class Probe:
            def __init__(self, path: str, index: int) -> None:
                assert Path(path).parent == tmp_path and Path(path).stat().st_size > 0

            def require(self) -> None:
                if registration is not None:
                    raise registration

            def close(self) -> None:
                pass

        monkeypatch.setattr(checks, "ask_child", answer)
        monkeypatch.setattr("penstock.runtime.registration_probe.RegistrationProbe", Probe)
        return {line.name: line for line in Doctor(tmp_path).lines()}

    return lines


def test_this_machine(cli: Cli, tmp_path: Path) -> None:
    """The compiler really compiles and what it built is loaded."""
    told = cli("doctor", "--folder", tmp_path, "--json")
    found = {line["name"]: line for line in told.document["lines"]}
    assert list(found) == [
        "python",
        "native core",
        "torch",
        "C++ compiler",
        "driver",
        "GPU",
        "link",
        "registration",
        "host memory",
        "locked memory",
        "disk",
    ]
    for name in ("python", "native core", "torch", "C++ compiler"):
        assert found[name]["status"] == "pass", found[name]
    assert "built, loaded and called" in found["C++ compiler"]["finding"]
    assert told.code == (0 if told.document["ok"] else 1)
    assert told.document["ok"] is all(line["status"] != "fail" for line in found.values())
    assert all(line["remedy"] for line in found.values() if line["status"] != "pass")
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_everything(examine: Examine) -> None:
    found = examine()
    assert {line.status for name, line in found.items() if name not in ("locked memory", "host memory", "disk")} == {
        "pass"
    }
    assert "55.00 GB/s" in found["link"].finding and "24 GiB" in found["GPU"].finding


def test_no_gpu_is_a_warning_that_says_what_works(examine: Examine) -> None:
    found = examine(_DRIVER={"missing": "libcuda.so.1"}, _COMPILER=with_torch(cuda=None, sees=False))
    for name in ("driver", "GPU", "link", "registration"):
        assert found[name].status == "warn" and found[name].remedy, name
    assert "export and run work for the CPU" in str(found["GPU"].remedy)


@pytest.mark.parametrize(
    ("answers", "name", "status"),
    [
        (NO_TORCH, "torch", "fail"),
        (NO_TORCH, "C++ compiler", "fail"),
        ({"_COMPILER": with_torch(version="2.9.1")}, "torch", "fail"),
        ({"_COMPILER": with_torch(sees=False)}, "GPU", "warn"),
        ({"_COMPILER": {"torch": TORCH, "problem": "is bad", "all": "is bad\nSet CXX"}}, "C++ compiler", "fail"),
        ({"_COMPILER": {"torch": TORCH, "problem": "is bad", "all": "is bad\nSet CXX"}}, "torch", "pass"),
        (CRASHING_COMPILER, "C++ compiler", "fail"),
        (CRASHING_COMPILER, "torch", "pass"),
        ({"_DRIVER": ChildFailure("no answer within 60 s")}, "driver", "warn"),
        ({"_DRIVER": {**GPU, "gpus": [{"name": "old", "bytes": 1, "maps": False}]}}, "GPU", "fail"),
        ({"_LINK": ChildFailure("out of memory")}, "link", "fail"),
        ({"registration": RegistrationError("hangs")}, "registration", "warn"),
        ({"registration": OSError("read-only")}, "registration", "fail"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_a_remedy(
    examine: Examine, answers: dict[str, Any], name: str, status: str
) -> None:
    line = examine(**answers)[name]
    assert line.status == status and bool(line.remedy) is (status != "pass")


def test_a_failing_line_fails_the_command(cli: Cli, examine: Examine, tmp_path: Path) -> None:
    assert examine()["torch"].status == "pass"
    assert cli("doctor", "--folder", tmp_path).code == 0
    examine(**NO_TORCH)
    told = cli("doctor", "--folder", tmp_path)
    assert told.code == 1 and "-> pip install torch" in told.stdout and "No module named" in told.stdout


def test_a_child_that_answers() -> None:
    assert ask_child("import sys; print('noise'); print('{\"a\": %s}' % sys.argv[1])", "7", timeout_s=60) == {"a": 7}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("raise SystemExit('the reason')", "the reason"),
        ("import no_such_module", "no_such_module"),
        ("print('no json')", "no json"),
        ("pass", "said nothing"),
    ],
)
def test_a_child_that_fails(code: str, said: str) -> None:
    with pytest.raises(ChildFailure, match=said):
        ask_child(code, timeout_s=60)


def test_a_child_that_hangs_is_killed_with_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pids"
    code = (
        "import json, os, signal, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '3600'])\n"
        "open(sys.argv[1] + '.new', 'w').write(json.dumps([os.getpid(), child.pid]))\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "signal.pause()\n"
    )
    genuine = subprocess.Popen.communicate

    def hurried(self: Any, *arguments: Any, timeout: float) -> Any:
        """The time is up as soon as both processes are there, however slow the machine is."""
        if timeout == 60:
            _wait_until(note.exists)
            raise subprocess.TimeoutExpired(self.args, timeout)
        return genuine(self, *arguments, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", hurried)
    with pytest.raises(ChildFailure, match="no answer within 60 s"):
        ask_child(code, str(note), timeout_s=60)
    _wait_until(lambda: not any(_alive(pid) for pid in json.loads(note.read_text())))


def _wait_until(true: Callable[[], object]) -> None:
    while not true():
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
