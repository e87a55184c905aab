"""A cache of what takes minutes or gigabytes to make: compiled programs and weights files.

    <folder>/programs/<name>/   what was made, with key.json, manifest.json and the stamp of its last use
    <folder>/weights/<name>/    the same
    <folder>/locks/             one file for each entry, locked while it is made

An entry is whole or absent: it is made in a temporary folder beside its place, and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.printable import printable
from penstock.store import cache_folder
from penstock.store.cache_folder import check_private, make_private, writing
from penstock.store.entries import Entry, files_bytes, read_entry
from penstock.store.entry_lock import entry_lock
from penstock.store.leases import Leases, unused
from penstock.store.manifest import canonical, entry_name, fault, read_key, seal, sync_folder
from penstock.temporary import PREFIX, TemporaryFolder, sweep

KINDS = ("programs", "weights")
_NAME = re.compile("[0-9a-f]{32}")
_NOUNS = {"programs": "the program", "weights": "the weights"}


class Store:
    """The cache in `folder`, or in the folder of this user.

    What entry() returned stays in place for as long as this object lives, or until close(): no process's clear()
    removes it. Keep the object for as long as the files may be opened.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder.cache_folder(folder)
        self._leases = Leases()

    def close(self) -> None:
        """What entry() returned may be cleared from now on. Files that are open or mapped stay readable."""
        self._leases.close()

    def entry(
        self, kind: str, key: Mapping[str, Any], make: Callable[[Path], None], say: Callable[[str], None]
    ) -> Path:
        """The folder with what `make` wrote for this key, now or earlier.

        `make` writes files, and no folders, into the empty folder that it is given. It is called by one thread of one
        process at a time; the others wait. It must not ask for the same entry. `say` is told what is waited for, and
        why an existing entry is made again.
        """
        key_text = canonical(key)
        place = self._kind_folder(kind) / entry_name(key_text)
        for folder in (self.folder, place.parent, self._lock_path(place).parent):
            make_private(folder)
        # Most of the time the entry is there, and nobody needs to wait.
        if self._leases.take(place) and fault(place, key_text) is None:
            return place
        self._leases.drop(place)
        what = _described(kind, key)
        with entry_lock(self._lock_path(place), f"makes {what}", say):
            # The previous holder of the lock may have made it.
            there = os.path.lexists(place)
            wrong = fault(place, key_text) if there else None
            if wrong is not None:
                say(f"{what} in {printable(str(place))} is made again: {wrong}")
            if not there or wrong is not None:
                self._make(place, key_text, make)
            self._leases.take(place)
        return place

    def list(self) -> list[Entry]:
        """What is in the cache, by kind, the last used first. Nothing is checked."""
        found = [read_entry(kind, path) for kind in KINDS for path in self._places(kind)]
        there = [entry for entry in found if entry is not None]
        return sorted(there, key=lambda entry: (entry.kind, -entry.used_s, entry.name))

    def clear(self, kind: str | None = None, say: Callable[[str], None] | None = None) -> int:
        """Removes entries and what killed processes left; returns how many bytes that freed.

        Entries that are being made stay, and so do those that an open store returned; `say` is told of each. A process
        that closed its store too early, or has no locks, still keeps what it has mapped: Linux frees a file without a
        name when its last mapping goes.
        """
        freed_bytes = 0
        for one in KINDS if kind is None else (kind,):
            places = self._places(one)
            freed_bytes += _swept_bytes(self._kind_folder(one))
            for place in places:
                what = f"{_described(one, read_key(place) or {})} in {printable(str(place))}"
                removed_bytes = self._remove(place)
                freed_bytes += removed_bytes or 0
                if removed_bytes is None and say is not None:
                    say(f"{what} is in use, and stays")
        return freed_bytes

    def require_space(self, needed_bytes: int) -> None:
        """Removes what killed processes left. Then raises DiskFullError unless that much is free."""
        for kind in KINDS:
            sweep(self._kind_folder(kind))
        cache_folder.require_space(self.folder, needed_bytes)

    def _kind_folder(self, kind: str) -> Path:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(map(repr, KINDS))}")
        return self.folder / kind

    def _lock_path(self, place: Path) -> Path:
        return self.folder / "locks" / f"{place.parent.name}-{place.name}"

    def _places(self, kind: str) -> Sequence[Path]:
        folder = self._kind_folder(kind)
        if not os.path.lexists(self.folder):
            return []
        check_private(self.folder)
        if not os.path.lexists(folder):
            return []
        check_private(folder)
        with writing(self.folder):
            return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))

    def _make(self, place: Path, key_text: str, make: Callable[[Path], None]) -> None:
        with contextlib.ExitStack() as stack:
            with writing(self.folder):
                scratch = stack.enter_context(TemporaryFolder(place.parent.name, place.parent))
                made = scratch / "made"
                made.mkdir(mode=0o700)
            make(made)  # its errors are its own
            with writing(self.folder):
                seal(made, key_text)
                if os.path.lexists(place):
                    place.rename(scratch / "damaged")  # goes with the folder
                made.rename(place)
                sync_folder(place.parent)

    def _remove(self, place: Path) -> int | None:
        """Returns the bytes that it had; None if it is in use."""
        make_private(self._lock_path(place).parent)
        with entry_lock(self._lock_path(place), "clears the cache", None) as held:
            if not held:
                return None
            with unused(place) as free:
                if not free:
                    return None
                nbytes = files_bytes(place)
                with writing(self.folder), TemporaryFolder(place.parent.name, place.parent) as scratch:
                    # Renamed first, so that nobody finds half of it.
                    with contextlib.suppress(FileNotFoundError):
                        place.rename(scratch / "cleared")
                return nbytes


def _described(kind: str, key: Mapping[str, Any]) -> str:
    model = key.get("model")
    return f"{_NOUNS[kind]} of {printable(model)}" if isinstance(model, str) else _NOUNS[kind]


def _swept_bytes(folder: Path) -> int:
    before = {path: files_bytes(path) for path in folder.glob(f"{PREFIX}*")}
    sweep(folder)
    return sum(nbytes for path, nbytes in before.items() if not os.path.lexists(path))
