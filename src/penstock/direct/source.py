"""The kernels' text, compiled at run time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from penstock.direct.failures import KernelCompileError

_FOLDER = Path(__file__).parent / "kernels"


@dataclass(frozen=True)
class Source:
    """One .cu file and the headers it may include, by name."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]


@lru_cache
def read_source(name: str) -> Source:
    if not (_FOLDER / name).is_file():
        raise KernelCompileError(f"the kernel source {name} is not in {_FOLDER}: the installation is not whole")
    headers = tuple((path.name, path.read_text()) for path in sorted(_FOLDER.glob("*.h")))
    return Source(name, (_FOLDER / name).read_text(), headers)
