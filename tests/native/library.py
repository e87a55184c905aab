"""What tests need and the core does not ship: the driver that wraps any other, and what a soft driver has inside.

Built when it is first asked for, against the core that the tests run with, and kept as long as no source changes. Other
builds of the core (tests/runtime/builds.py) have the same sources in them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE_SOURCES = ROOT / "csrc"
HEADERS = ROOT / "src" / "penstock" / "include"
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror=return-type", "-pthread"]


def core_path() -> Path:
    named = os.environ.get("PENSTOCK_CORE_LIBRARY")
    return Path(named) if named else ROOT / "src" / "penstock" / "libpenstock.so"


@functools.cache
def testing() -> ctypes.CDLL:
    core = ctypes.CDLL(str(core_path()))
    return core if hasattr(core, "penstock_test_wrap") else ctypes.CDLL(str(_built()))


def _built() -> Path:
    target = ROOT / "build" / "testing" / _key() / "libpenstock_testing.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Of its own name until it is whole: another worker may build the same.
        partial = target.with_suffix(f".{os.getpid()}.partial")
        folder = core_path().resolve().parent
        link = [f"-L{folder}", f"-l:{core_path().name}", f"-Wl,-rpath,{folder}"]
        command = [COMPILER, *FLAGS, f"-I{CORE_SOURCES}", f"-I{HEADERS}", *map(str, SOURCES), "-o", str(partial), *link]
        subprocess.run(command, check=True)
        partial.replace(target)
    return target


def _key() -> str:
    """Of all that goes into it: classes of the core are laid out by its headers."""
    made = hashlib.sha256(f"{COMPILER} {FLAGS} {core_path().resolve()}".encode())
    for source in (
        *sorted(Path(__file__).parent.glob("*.[ch]*")),
        *sorted(CORE_SOURCES.glob("*/*.h")),
        *sorted(HEADERS.iterdir()),
    ):
        made.update(f" {source.name} ".encode() + source.read_bytes())
    return made.hexdigest()[:16]
