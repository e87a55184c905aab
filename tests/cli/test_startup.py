"""Commands that need no torch import none: counted in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import penstock.cli.main as main_file
from tests.cli.conftest import write_metadata
from tests.runtime.programs import a_program

SLOW = ("torch", "numpy", "executorch", "tqdm", "matplotlib", "safetensors", "transformers")

# Counts what commands add to a bare interpreter, by the first part of its name.
COUNT = """
import json, os, sys
before = set(sys.modules)
from penstock.cli.main import main
code = max(main(line.split()) for line in sys.argv[1:])
counts = {}
for name in set(sys.modules) - before:
    counts[name.split(".")[0]] = counts.get(name.split(".")[0], 0) + 1
print(json.dumps({"code": code, "counts": counts}), file=sys.stderr)
"""


def _counts(*commands: str) -> dict[str, int]:
    done = subprocess.run([sys.executable, "-c", COUNT, *commands], capture_output=True, text=True, check=True)
    told = json.loads(done.stderr.splitlines()[-1])
    assert told["code"] == 0, done.stderr
    return dict(told["counts"])


def test_help_imports_nothing_slow() -> None:
    counts = _counts("--help")
    assert counts["penstock"] > 5 and counts["click"] > 5, "the counting itself works"
    assert [name for name in (*SLOW, "rich") if counts.get(name)] == []


def test_no_command_imports_anything_slow_before_it_runs() -> None:
    counts = _counts(*(f"{command} --help" for command in main_file.penstock.commands))
    assert [name for name in (*SLOW, "rich") if counts.get(name)] == []


def test_inspect_of_a_program_imports_nothing_slow(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "model.pt2", a_program())
    counts = _counts(f"inspect {path}")
    assert [name for name in SLOW if counts.get(name)] == []


def test_inspect_of_weights_needs_no_torch(program: Path) -> None:
    counts = _counts(f"inspect {program.with_suffix('.ptd')}")
    # flatbuffers, which reads the index, takes numpy along where there is one.
    assert [name for name in SLOW if name != "numpy" and counts.get(name)] == []


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("penstock, version ")
