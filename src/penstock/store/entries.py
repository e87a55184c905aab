"""Lists what lies in the cache. Nothing is checked, and nothing changes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.store.manifest import MANIFEST_FILE, STAMP_FILE, read_key


@dataclass(frozen=True)
class Entry:
    """One thing in the cache. `key` is None if it cannot be read: such an entry is made again when it is needed."""

    kind: str
    name: str
    path: Path
    key: Mapping[str, Any] | None
    nbytes: int
    # Seconds since 1970.
    created_s: float
    used_s: float

    @property
    def model(self) -> str | None:
        """What the key calls the model."""
        found = None if self.key is None else self.key.get("model")
        return found if isinstance(found, str) else None


def read_entry(kind: str, path: Path) -> Entry | None:
    """None if the entry was removed meanwhile."""
    try:
        created_s = _first_mtime(path / MANIFEST_FILE, path)
        used_s = _first_mtime(path / STAMP_FILE, path / MANIFEST_FILE, path)
    except OSError:
        return None
    return Entry(kind, path.name, path, read_key(path), files_bytes(path), created_s, used_s)


def files_bytes(folder: Path) -> int:
    nbytes = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it was removed meanwhile
                nbytes += (Path(base) / name).lstat().st_size
    return nbytes


def _first_mtime(*paths: Path) -> float:
    there = next((path for path in paths if os.path.lexists(path)), paths[-1])
    return there.lstat().st_mtime
