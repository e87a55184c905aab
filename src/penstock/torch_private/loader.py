"""Compiled packages, loaded and called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


class CompiledMethod:
    """One method of a .pt2, with flat inputs and outputs. The native core must be loaded first.

    torch's own load_package compares the machine with the one that compiled, and for that imports the compiler and has
    it build test programs: half a minute, for a warning. check_build makes the comparisons that matter.
    """

    def __init__(self, path: Path, method: str, device_index: int = -1) -> None:
        # Single-threaded: no copies of the model inside, no synchronisation of the device at the end of a run.
        run_single_threaded, runners = True, 1
        self._loader = torch._C._aoti.AOTIModelPackageLoader(
            str(path), method, run_single_threaded, runners, device_index
        )

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._loader.run(list(inputs)))

    @property
    def constant_names(self) -> list[str]:
        return list(self._loader.get_constant_fqns())
