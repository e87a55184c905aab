"""Compiled packages, loaded and called."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

_one_at_a_time = threading.Lock()


@contextmanager
def _unpacking() -> Iterator[str]:
    """A folder of our own for what torch unpacks to load it: torch leaves its own behind where the disk is full.

    torch asks the environment where temporary files go. If the block fails, the folder goes with all that is in it.
    """
    with _one_at_a_time:
        before = os.environ.get("TMPDIR")
        folder = tempfile.mkdtemp(prefix=f"penstock-code-{os.getpid()}-")
        try:
            os.environ["TMPDIR"] = folder
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
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
        with _unpacking() as folder:
            self._loader = torch._C._aoti.AOTIModelPackageLoader(
                str(path), method, run_single_threaded, runners, device_index
            )
            self._unpacked = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._loader.run(list(inputs)))

    @property
    def constant_names(self) -> list[str]:
        return list(self._loader.get_constant_fqns())
