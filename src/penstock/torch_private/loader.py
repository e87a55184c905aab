"""Compiled packages, loaded and called.

torch never unloads the library of a package, and each load of an archive unpacks it again. A process that loads one
program a thousand times would hold a thousand copies, in memory and on disk, in deleted files that still take space.
From torch 2.13 on, a package may be a folder: a process unpacks each program once, and every load shares its library.
"""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from penstock.temporary import TemporaryFolder

LOADS_FOLDERS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

# Keyed by process, since a folder disappears with the process that made it, and by content.
_unpacked: dict[tuple[int, str], tuple[TemporaryFolder, Path]] = {}
_one_at_a_time = threading.Lock()


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """torch asks the environment where temporary files go."""
    with _one_at_a_time:
        before = os.environ.get("TMPDIR")
        try:
            os.environ["TMPDIR"] = str(folder)
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def _unpacked_once(path: Path) -> Path:
    """The folder with everything that is in the archive, for as long as this process lives."""
    content = path.read_bytes()
    key = (os.getpid(), xxhash.xxh3_128_hexdigest(content))
    with _one_at_a_time:
        known = _unpacked.get(key)
        # A cleaner of temporary files may have removed it.
        if known is not None and known[1].is_dir():
            return known[1]
        folder = TemporaryFolder("code")
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                archive.extractall(folder.path)
            (root,) = folder.path.iterdir()
        except OSError as error:
            folder.remove()
            raise OSError(error.errno, f"{error.strerror}, to unpack it there", str(folder.path)) from error
        except BaseException:
            folder.remove()
            raise
        _unpacked[key] = folder, root
        return root


class CompiledMethod:
    """One method of a .pt2, with flat inputs and outputs. The native core must be loaded first.

    torch's own load_package compares the machine with the one that compiled. To do so it imports the compiler and has
    it build test programs: half a minute, for a warning. check_build makes the comparisons that matter.
    """

    def __init__(self, path: Path, method: str, device_index: int = -1) -> None:
        # Single-threaded: no copies of the model inside, no synchronisation of the device at the end of a run.
        run_single_threaded, runners = True, 1
        if LOADS_FOLDERS:
            folder = str(_unpacked_once(path))
            self._loader = torch._C._aoti.AOTIModelPackageLoader(
                folder, method, run_single_threaded, runners, device_index
            )
            return
        # For the files that torch unpacks to load, and leaves behind if the disk is full or its process is killed.
        self._unpacked = TemporaryFolder("code")
        try:
            with _temporary_files_in(self._unpacked.path):
                self._loader = torch._C._aoti.AOTIModelPackageLoader(
                    str(path), method, run_single_threaded, runners, device_index
                )
        except BaseException:
            self._unpacked.remove()
            raise

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._loader.run(list(inputs)))
