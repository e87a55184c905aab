"""ExecuTorch: the same weightless program as .pte and .ptd, run by ExecuTorch's runtime with our delegate.

penstock.executorch.export(ep, "model.pte")       # writes model.pte and model.ptd
penstock.executorch.Module("model.pte", weight_offload_budget_mb=512)(*args)
penstock.executorch.merge_weights(["a.ptd", "b.ptd"], "model.ptd")
penstock.executorch.load_library()                # for ExecuTorch's own Runtime, which then knows the delegate
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.executorch.data_files import merge_weights
    from penstock.executorch.dialect import erase_fetches
    from penstock.executorch.library import library_path, load_library
    from penstock.executorch.lowering import Exported, export
    from penstock.executorch.module import Module
    from penstock.executorch.partitioner import CudaPartitioner

__all__ = [
    "CudaPartitioner",
    "Exported",
    "Module",
    "erase_fetches",
    "export",
    "library_path",
    "load_library",
    "merge_weights",
]

_HOMES = {
    "CudaPartitioner": "partitioner",
    "Exported": "lowering",
    "Module": "module",
    "erase_fetches": "dialect",
    "export": "lowering",
    "library_path": "library",
    "load_library": "library",
    "merge_weights": "data_files",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.executorch' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"penstock.executorch.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "executorch":
            raise
        raise PenstockError("executorch is not installed: pip install 'penstock[executorch]'") from error
