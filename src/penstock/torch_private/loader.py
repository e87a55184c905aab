"""Compiled packages, loaded and called."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

# How the loader names the folders that it unpacks to: since 2.12, and before.
_UNPACKED = r"/(?:aotinductor_)?[A-Za-z0-9]{6}(?=/)"


def _remove_unpacked(told: str) -> None:
    """Where unpacking fails, on a full disk say, the loader leaves what it has unpacked; its error names the place."""
    for base in {os.environ.get("TMPDIR", "/tmp").rstrip("/"), "/tmp"}:
        for folder in set(re.findall(re.escape(base) + _UNPACKED, told)):
            shutil.rmtree(folder, ignore_errors=True)


class CompiledMethod:
    """One method of a .pt2, with flat inputs and outputs. The native core must be loaded first.

    torch's own load_package compares the machine with the one that compiled, and for that imports the compiler and has
    it build test programs: half a minute, for a warning. check_build makes the comparisons that matter.
    """

    def __init__(self, path: Path, method: str, device_index: int = -1) -> None:
        # Single-threaded: no copies of the model inside, no synchronisation of the device at the end of a run.
        run_single_threaded, runners = True, 1
        try:
            self._loader = torch._C._aoti.AOTIModelPackageLoader(
                str(path), method, run_single_threaded, runners, device_index
            )
        except RuntimeError as error:
            _remove_unpacked(str(error))
            raise

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._loader.run(list(inputs)))

    @property
    def constant_names(self) -> list[str]:
        return list(self._loader.get_constant_fqns())
