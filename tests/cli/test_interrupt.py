"""A real SIGINT: exit code 130, and no file and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.cli.interrupt import descendants
from tests.cli.models import WIDTH

ROOT = Path(__file__).parents[2]

# A driver that starts the compiler proper, which outlives it when it is killed; and a temporary file of its own.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then exec "{real}" --version; fi
mktemp
sleep 3600 &
sleep 3600 &
echo started > "{mark}"
wait
"""


def until(true: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while not true():
        assert process.poll() is None, f"it ended with {process.returncode}"
        time.sleep(0.02)


def start(tmp_path: Path, *arguments: object, **env: str) -> subprocess.Popen[bytes]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def interrupt(process: subprocess.Popen[bytes]) -> tuple[str, str, list[int]]:
    """Only the process itself gets the signal: a terminal would send it to its children as well."""
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err.decode()
    return out.decode(), err.decode(), [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_children_of_children_are_ended(tmp_path: Path) -> None:
    """Also those that ignore the signal, and whose parent is killed over them."""
    mark = tmp_path / "mark"
    script = f"trap '' INT; sleep 3600 & sleep 3600 & echo > {mark}; wait; sleep 3600"
    code = (
        "import subprocess, sys\n"
        "from penstock.cli.interrupt import interruptible\n"
        "try:\n"
        "    with interruptible():\n"
        f"        subprocess.run(['bash', '-c', {script!r}])\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    process = start(tmp_path, "-c", code)
    until(mark.exists, process)
    until(lambda: len(descendants(process.pid)) == 3, process)
    _, _, left = interrupt(process)
    assert left == []


def test_export(tmp_path: Path) -> None:
    compiler, mark, out = tmp_path / "g++", tmp_path / "mark", tmp_path / "out"
    out.mkdir()
    real = subprocess.run(["which", "g++"], capture_output=True, text=True, check=True).stdout.strip()
    compiler.write_text(COMPILER.format(real=real, mark=mark))
    compiler.chmod(0o755)
    arguments = ("-m", "penstock", "export", "tests.cli.models:pair", "-o", out / "m.pt2", "--device", "cpu", "--json")
    process = start(tmp_path, *arguments, CXX=str(compiler))
    until(mark.exists, process)
    assert list((tmp_path / "tmp").iterdir()), "there is something to be removed"
    stdout, stderr, left = interrupt(process)
    assert left == [] and list(out.iterdir()) == []
    # What torch itself caches between exports is its own, and whole.
    kept = [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
    assert kept == []
    assert '"exit_code": 130' in stdout and "interrupted" in stderr and "Traceback" not in stderr


def test_run(tmp_path: Path, program: Path) -> None:
    torch.save({"index": torch.arange(5), "scale": torch.ones(WIDTH)}, tmp_path / "in.pt")
    out = tmp_path / "out"
    out.mkdir()
    files = ("--trace", out / "t.json", "--out", out / "o.pt")
    runs = ("--inputs", tmp_path / "in.pt", "--budget", "1GB", "--repeat", 10**9)
    process = start(tmp_path, "-m", "penstock", "run", program, *runs, *files)
    until(lambda: ".wrapper.so" in Path(f"/proc/{process.pid}/maps").read_text(), process)
    _, stderr, left = interrupt(process)
    assert left == [] and list(out.iterdir()) == [] and list((tmp_path / "tmp").iterdir()) == []
    assert "interrupted" in stderr and "Traceback" not in stderr


def test_doctor(tmp_path: Path) -> None:
    process = start(tmp_path, "-m", "penstock", "doctor", "--folder", tmp_path / "tmp")
    until(lambda: descendants(process.pid), process)
    _, _, left = interrupt(process)
    assert left == [] and list((tmp_path / "tmp").iterdir()) == []


def test_an_interrupt_stays_one_whatever_is_made_of_it(tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        "import penstock.cli.main as file\n"
        "def inspect(path):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n"
        "        raise ProcessLookupError('while cleaning up')\n"
        "import penstock.cli.subject\n"
        "penstock.cli.subject.read_subject = inspect\n"
        "sys.exit(file.main(['inspect', 'model.pt2', '--json']))\n"
    )
    process = start(tmp_path, "-c", code)
    out, err = process.communicate()
    assert process.returncode == 130 and b"Traceback" not in err and b'"exit_code": 130' in out
