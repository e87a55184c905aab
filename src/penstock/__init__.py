"""Penstock runs a PyTorch model whose weights do not fit in GPU memory inside a byte budget.

ep = penstock.apply_weight_offload(torch.export.export(model, args))
penstock.compile(ep, "model.pt2")        # writes model.pt2 (program) and model.ptd (weights)
y = penstock.Module("model.pt2", weight_offload_budget_mb=512)(*args)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.version import VERSION as __version__

if TYPE_CHECKING:
    from penstock.export.compile import Compiled, compile
    from penstock.export.offload import apply_weight_offload
    from penstock.models.pretrained import from_pretrained
    from penstock.module import Module
    from penstock.program import read_program
    from penstock.weights.packing import pack, unpack

__all__ = [
    "Compiled",
    "Module",
    "PenstockError",
    "__version__",
    "apply_weight_offload",
    "compile",
    "from_pretrained",
    "pack",
    "read_program",
    "unpack",
]

# Imported when first used: reading a file's index or its metadata needs no torch, and torch takes seconds to import.
_HOMES = {
    "Compiled": "penstock.export.compile",
    "Module": "penstock.module",
    "apply_weight_offload": "penstock.export.offload",
    "compile": "penstock.export.compile",
    "from_pretrained": "penstock.models.pretrained",
    "pack": "penstock.weights.packing",
    "read_program": "penstock.program",
    "unpack": "penstock.weights.packing",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
