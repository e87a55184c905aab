"""How fast DFloat11's kernel decodes out of device memory: through its own loader and hook, as in a model."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.dfloat11_encoding import encoded_tensors
from bench.suite.systems.dfloat11_model import DFLOAT11

COLUMNS = 4096
# The largest weight of a block of Llama-3-8B's shape; and all of the block's, which DFloat11 decodes at once.
ROWS = (14336, 53248)


class Decoded(nn.Linear):
    """A layer that does nothing but be decoded: DFloat11's hook runs before this."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight


def measure(seconds: Callable[[Callable[[], None]], float], device: str = "cuda:0") -> dict[str, Any]:
    missing = DFLOAT11.missing(device)
    if missing:
        return {"missing": missing, "rows": []}
    try:
        import dfloat11  # noqa: F401
    except ImportError as error:
        # There is a package of that name, but not one that works here.
        return {"missing": f"not importable: {error}", "rows": []}
    rows = [_row(count, seconds, device) for count in ROWS]
    return {"missing": "", "version": importlib.metadata.version("dfloat11"), "rows": rows}


def _row(count: int, seconds: Callable[[Callable[[], None]], float], device: str) -> dict[str, Any]:
    weight = (torch.randn(count, COLUMNS, device=device) * 0.02).to(torch.bfloat16)
    layer, encoded_bytes = encoded_layer(weight)
    unused = torch.empty(0, device=device)

    def work() -> None:
        layer(unused)

    rate = weight.nbytes / seconds(work)
    return {
        "values": weight.numel(),
        "bytes_per_s": rate,
        "ratio": encoded_bytes / weight.nbytes,
        "equal": torch.equal(layer(unused).view(torch.int16), weight.view(torch.int16)),
    }


def encoded_layer(weight: Tensor) -> tuple[nn.Module, int]:
    """A layer that DFloat11 has loaded onto the weight's device, and the bytes that are held for it there."""
    from dfloat11 import DFloat11Model
    from safetensors.torch import save_file

    rows, columns = weight.shape
    model = nn.ModuleDict({"layer": Decoded(columns, rows, bias=False, device="meta", dtype=weight.dtype)})
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "layer.safetensors"
        save_file({f"layer.{name}": tensor for name, tensor in encoded_tensors([weight]).items()}, path)
        model = DFloat11Model.from_single_file(str(path), {"layer": []}, model, device=str(weight.device))
    return model["layer"], sum(tensor.nbytes for tensor in model.state_dict().values())
