"""What an entry of the cache holds: written when it is made, compared each time before it is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.printable import printable

KEY_FILE = "key.json"
MANIFEST_FILE = "manifest.json"
# Its mtime is the time of the last use.
STAMP_FILE = "used"
OWN_FILES = (KEY_FILE, MANIFEST_FILE, STAMP_FILE)

_FORMAT = 1
# Hashing gigabytes at each load would take longer than the load. A weights file has checksums of its own.
_HASHED_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
# A key names every shard of a checkpoint: kilobytes.
_LONGEST_TEXT_BYTES = 16 << 20


@dataclass(frozen=True)
class SealedFile:
    name: str
    nbytes: int
    # One of the two is set: for a large file, the time stands in for the hash.
    sha256: str | None
    mtime_ns: int | None


def canonical(key: Mapping[str, Any]) -> str:
    """Equal mappings have equal text, whatever their order."""
    return json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)


def entry_name(key_text: str) -> str:
    """The name of an entry's folder. If two keys ever share it, the key in the folder tells them apart."""
    return hashlib.sha256(key_text.encode()).hexdigest()[:32]


def read_key(folder: Path) -> dict[str, Any] | None:
    """The key that the entry was made for; None if it cannot be read, or is not the one of this folder."""
    try:
        text = _read_text(folder / KEY_FILE)
        key = json.loads(text) if entry_name(text) == folder.name else None
    except (OSError, ValueError, RecursionError):
        return None
    return key if isinstance(key, dict) else None


def seal(folder: Path, key_text: str) -> None:
    """Puts the key and the manifest beside the files; when it returns, all of them are on the disk."""
    files = [_sealed(path) for path in sorted(folder.iterdir())]
    _write_text(folder / KEY_FILE, key_text)
    # Last: where there is a manifest, there is everything else.
    _write_text(folder / MANIFEST_FILE, json.dumps({"format": _FORMAT, "files": [asdict(file) for file in files]}))
    sync_folder(folder)


def fault(folder: Path, key_text: str) -> str | None:
    """What is wrong with an existing entry, in words; None if it is what was made for this key."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return "it is not a folder"
        files = _read_manifest(folder / MANIFEST_FILE)
    except (OSError, ValueError, RecursionError) as error:
        return f"its {MANIFEST_FILE} cannot be read: {_said(error)}"
    try:
        if _read_text(folder / KEY_FILE) != key_text:
            return "it was made for another key"
    except (OSError, ValueError) as error:
        return f"its {KEY_FILE} cannot be read: {_said(error)}"
    return next((wrong for file in files if (wrong := _difference(folder / file.name, file)) is not None), None)


def sync_folder(folder: Path) -> None:
    """Syncs the names of files, too: they are on the disk only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sealed(path: Path) -> SealedFile:
    if path.name in OWN_FILES:
        raise ValueError(f"{path.name} is a name of the cache's own, needs to be another one")
    descriptor = _open_regular(path)
    try:
        # Only small files are hashed later. If the bytes of a large one never reached the disk, nobody would notice.
        os.fsync(descriptor)
        found = os.fstat(descriptor)
        if found.st_size <= _HASHED_BYTES:
            return SealedFile(path.name, found.st_size, _sha256(descriptor), None)
        return SealedFile(path.name, found.st_size, None, found.st_mtime_ns)
    finally:
        os.close(descriptor)


def _difference(path: Path, sealed: SealedFile) -> str | None:
    name = printable(sealed.name)
    try:
        descriptor = _open_regular(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {_said(error)}"
    try:
        found = os.fstat(descriptor)
        if found.st_size != sealed.nbytes:
            return f"{name} has {found.st_size} bytes, needs {sealed.nbytes}"
        if sealed.sha256 is None:
            return None if found.st_mtime_ns == sealed.mtime_ns else f"{name} was written to after it was made"
        return None if _sha256(descriptor) == sealed.sha256 else f"{name} holds other bytes than were written"
    except OSError as error:
        return f"{name} cannot be read: {_said(error)}"
    finally:
        os.close(descriptor)


def _read_manifest(path: Path) -> list[SealedFile]:
    found = json.loads(_read_text(path))
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError("it is of another format")
    try:
        files = [SealedFile(**file) for file in found["files"]]
    except (KeyError, TypeError) as error:
        raise ValueError("it lists no files") from error
    for file in files:
        if not isinstance(file.name, str) or file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            raise ValueError("it lists a file without a name")
        if file.sha256 is None and file.mtime_ns is None:
            raise ValueError(f"it does not say what is in {printable(file.name)}")
    return files


def _open_regular(path: Path) -> int:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{printable(path.name)} is a link, needs to be a file") from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ValueError(f"{printable(path.name)} is not a file")


def _sha256(descriptor: int) -> str:
    digest, buffer, done = hashlib.sha256(), bytearray(_PIECE_BYTES), 0
    while count := os.preadv(descriptor, [buffer], done):
        digest.update(memoryview(buffer)[:count])
        done += count
    return digest.hexdigest()


def _read_text(path: Path) -> str:
    with os.fdopen(_open_regular(path), "rb") as file:
        raw = file.read(_LONGEST_TEXT_BYTES + 1)
    if len(raw) > _LONGEST_TEXT_BYTES:
        raise ValueError(f"it has more than {_LONGEST_TEXT_BYTES} bytes")
    return raw.decode()


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _said(error: Exception) -> str:
    return printable(str(error.strerror if isinstance(error, OSError) and error.strerror else error))
