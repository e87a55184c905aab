"""Commands in the pages: run, or looked up word by word where running them takes a GPU, minutes or a network."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.docs.info_strings import LOOKED_UP, said
from tests.docs.pages import ROOT


def commands(code: str) -> list[list[str]]:
    """The words of every command, without comments and without what is set in its environment."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            command = words[:end]
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                command = command[1:]
            found.append(command)
            words = words[end + 1 :]
    return found


def look_up(command: list[str]) -> str | None:
    """What is not there, or None."""
    name, *words = command
    if name == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [word for word in words if "=" not in word]
        return _first(f"make has no {t}" for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE))
    if name == "compute-sanitizer":
        return look_up(words[words.index("python") :])
    if name == "pip":
        project = (ROOT / "pyproject.toml").read_text()
        extras = re.findall(r"penstock\[(\w+)\]", " ".join(words))
        return _first(f"no extra {e}" for e in extras if not re.search(rf"^{e} = \[", project, re.MULTILINE))
    if name == "penstock":
        if not re.search(r'^penstock = "penstock\.', (ROOT / "pyproject.toml").read_text(), re.MULTILINE):
            return "pyproject.toml has no script of that name"
        if not (ROOT / f"src/penstock/cli/{words[0]}.py").exists():
            return f"there is no command {words[0]}"
        return look_up_options(words, (ROOT / "src/penstock/cli").glob("*.py"))
    if name == "python" and words[0] == "-m":
        return look_up_module(words[1], words[2:])
    return f"{name} is no command that is known here"


def look_up_module(module: str, words: list[str]) -> str | None:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return f"there is no module {module}"
    source = Path(spec.origin)
    if ROOT not in source.parents or "site-packages" in source.parts:
        return _first(f"there is no {word}" for word in words if "/" in word and not (ROOT / word).exists())
    return look_up_options(words, source.parent.glob("*.py") if source.name == "__init__.py" else [source])


def look_up_options(words: list[str], files: Iterable[Path]) -> str | None:
    text = "".join(file.read_text() for file in files)
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    return _first(f"there is no option {option}" for option in options if f'"{option}"' not in text)


def _first(faults: Iterable[str]) -> str | None:
    return next(iter(faults), None)


def test_commands_that_are_not_run_are_there() -> None:
    found = [
        (block.place, " ".join(command), look_up(command))
        for block, info in said("console")
        if info.marker in LOOKED_UP
        for command in commands(block.code)
    ]
    assert [row for row in found if row[2] is not None] == []
    assert len(found) > 10


@pytest.mark.parametrize(
    "line",
    [
        "make nonsense",
        "python -m bench.nonsense",
        "python -m bench.runtime --nonsense 3",
        "PYTHONPATH=src python -m pytest tests/gpu/test_nonsense.py",
        "pip install 'penstock[nonsense]'",
        "penstock nonsense",
        "nonsense",
    ],
)
def test_what_is_not_there_is_noticed(line: str) -> None:
    (command,) = commands(line + "  # with a comment\n")
    fault = look_up(command)
    assert fault is not None and ("nonsense" in fault or "script" in fault)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which `python` and `penstock` are those under test, installed or not."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, arguments in {"python": "", "penstock": "-m penstock"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (tools / name).chmod(0o755)
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}


def test_console_blocks_run(environment: dict[str, str]) -> None:
    for block, info in said("console"):
        if info.marker == "" or (info.marker == "gpu" and torch.cuda.is_available()):
            done = subprocess.run(
                ["bash", "-e"], input=block.code, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{block.place}: {done.stdout}{done.stderr}"
