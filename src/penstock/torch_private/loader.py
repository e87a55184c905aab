"""Compiled packages, loaded and called."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.temporary import TemporaryFolder

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


class CompiledMethod:
    """One method of a .pt2, with flat inputs and outputs. The native core must be loaded first.

    torch's own load_package compares the machine with the one that compiled, and for that imports the compiler and has
    it build test programs: half a minute, for a warning. check_build makes the comparisons that matter.
    """

    def __init__(self, path: Path, method: str, device_index: int = -1) -> None:
        # Single-threaded: no copies of the model inside, no synchronisation of the device at the end of a run.
        run_single_threaded, runners = True, 1
        # For what torch unpacks to load it, and leaves behind where the disk is full, or where its process is killed.
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

    @property
    def constant_names(self) -> list[str]:
        return list(self._loader.get_constant_fqns())
