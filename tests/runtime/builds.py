"""Other builds of the core than the installed one: with faults in it, or with a sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc"
HEADERS = ROOT / "src" / "penstock" / "include"
# What tests need besides is inside of these builds: a sanitizer sees it, too.
TESTING = ROOT / "tests" / "native"
COMPILER = os.environ.get("CXX", "g++")
WORKERS = os.cpu_count() or 1


def build_core(folder: Path, flags: Sequence[str], replaced: Mapping[str, str] | None = None) -> Path:
    """`replaced`: sources, or headers, that are other than the core's, or besides them, by path from csrc."""
    flags = ["-std=c++17", "-fPIC", "-pthread", *flags]
    names = {str(source.relative_to(SOURCES)) for source in SOURCES.glob("*/*.cpp")}
    names.remove("probe/main.cpp")  # a program of its own
    names |= {name for name in replaced or {} if name.endswith("cpp")}
    for name in {*names, *(replaced or {})}:
        (folder / name).parent.mkdir(exist_ok=True)
    testing = [str(source) for source in sorted(TESTING.glob("*.cpp"))]
    for name, text in (replaced or {}).items():
        (folder / name).write_text(text)

    def compiled(name: str) -> str:
        source = folder / name if name in (replaced or {}) else SOURCES / name
        _run(
            [
                COMPILER,
                *flags,
                f"-I{folder}",
                f"-I{SOURCES}",
                f"-I{HEADERS}",
                "-c",
                str(source),
                "-o",
                str(folder / f"{name}.o"),
            ]
        )
        return str(folder / f"{name}.o")

    with ThreadPoolExecutor(WORKERS) as workers:
        objects = list(workers.map(compiled, sorted(names)))
    path = folder / "core.so"
    _run([COMPILER, "-shared", *flags, f"-I{SOURCES}", f"-I{HEADERS}", *testing, *objects, "-o", str(path), "-ldl"])
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def play(
    library: Path,
    module: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
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
    )
