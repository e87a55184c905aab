"""Other builds of the core than the installed one: with a line less, or with a sanitizer in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc"
COMPILER = os.environ.get("CXX", "g++")
WORKERS = os.cpu_count() or 1


class Build:
    """The core's objects, compiled once with these flags, and libraries linked from them."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.folder = folder
        self._flags = ["-std=c++17", "-fPIC", "-pthread", *flags]
        names = [source.name for source in SOURCES.glob("*.cpp")]
        with ThreadPoolExecutor(WORKERS) as workers:
            objects = workers.map(lambda name: self._compile(name, SOURCES / name, folder / f"{name}.o"), names)
            self._objects = dict(zip(names, objects, strict=True))

    def library(self, name: str, replaced: str = "", text: str = "") -> Path:
        """With the source `replaced` compiled from `text` instead."""
        objects = dict(self._objects)
        if replaced:
            source = self.folder / f"{name}.cpp"
            source.write_text(text)
            objects[replaced] = self._compile(replaced, source, source.with_suffix(".o"))
        path = self.folder / f"{name}.so"
        _run([COMPILER, "-shared", *self._flags, *map(str, objects.values()), "-o", str(path), "-ldl"])
        return path

    def _compile(self, name: str, source: Path, target: Path) -> Path:
        _run([COMPILER, *self._flags, f"-I{SOURCES}", "-c", str(source), "-o", str(target)])
        return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def play(
    library: Path,
    module: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Runs a module of the tests with that library, in a process of its own."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PENSTOCK_CORE_LIBRARY": str(library),
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
