"""Compiles a model of large layers, in a process of its own:

    python -m tests.export.large_model LAYERS OUT REPORT [CHECKPOINT]

With a checkpoint the model is on meta; without one its weights are in memory. The report is what was measured, as JSON.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import torch
from torch import nn

import penstock
import penstock.export.compile as compile_module
from tests.harness import compiled, offloaded

WIDTH = 8192
# In bfloat16: 128 MiB.
LAYER_BYTES = 2 * WIDTH * WIDTH


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(x @ layer)
        return x


def write_checkpoint(folder: Path, layers: int, per_shard: int) -> None:
    """Shards that are mostly holes: they take no room. Each layer begins and ends with its number."""
    placed = {}
    for number, start in enumerate(range(0, layers, per_shard)):
        held = range(start, min(start + per_shard, layers))
        header = {
            f"layers.{layer}": {
                "dtype": "BF16",
                "shape": [WIDTH, WIDTH],
                "data_offsets": [place * LAYER_BYTES, (place + 1) * LAYER_BYTES],
            }
            for place, layer in enumerate(held)
        }
        raw = json.dumps(header).encode()
        file = folder / f"model-{number}.safetensors"
        with file.open("wb") as opened:
            opened.write(struct.pack("<Q", len(raw)) + raw)
            base = opened.tell()
            opened.truncate(base + len(held) * LAYER_BYTES)
            for place, layer in enumerate(held):
                for offset in (place * LAYER_BYTES, (place + 1) * LAYER_BYTES - 1):
                    opened.seek(base + offset)
                    opened.write(bytes([layer + 1]))
        placed |= dict.fromkeys(header, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def main(layers: int, out: Path, report: Path, checkpoint: Path | None) -> None:
    compile_module.check_toolchain = lambda: None  # type: ignore[assignment]  # it has its own tests
    device = "cpu" if checkpoint is None else "meta"
    with torch.device(device):
        model = Layers(layers)
        x = torch.empty(1, WIDTH, dtype=torch.bfloat16)
    if checkpoint is None:
        for number, layer in enumerate(model.layers):
            layer.data.fill_(number + 1)  # until then it has no pages
    result: penstock.Compiled = compiled(out, offloaded(model, (x,)), weights=checkpoint)
    peaks = result.peaks
    report.write_text(json.dumps({"start": peaks.host_start_bytes, "peak": peaks.host_peak_bytes}))


if __name__ == "__main__":
    count, out, report, *checkpoint = sys.argv[1:]
    main(int(count), Path(out), Path(report), Path(checkpoint[0]) if checkpoint else None)
