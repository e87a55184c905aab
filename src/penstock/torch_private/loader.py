"""Compiled packages, loaded and called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch._inductor.package.package import load_package


class CompiledMethod:
    """One method of a .pt2, with flat inputs and outputs. The native core must be loaded first."""

    def __init__(self, path: Path, method: str, device_index: int = -1) -> None:
        # Single-threaded: no copies of the model inside, no synchronisation of the device at the end of a run.
        self._model = load_package(
            str(path), model_name=method, run_single_threaded=True, num_runners=1, device_index=device_index
        )

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._model.loader.run(list(inputs)))

    @property
    def constant_names(self) -> list[str]:
        return list(self._model.get_constant_fqns())
