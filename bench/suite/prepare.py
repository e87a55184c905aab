"""Makes what all systems share: the weights file, the compiled programs, the link's bandwidth, the versions.

Run as a process of its own: `python -m bench.suite.prepare JOB.json RESULT.json`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import penstock
from bench.suite.measure import measure_link
from bench.suite.model import DTYPE, ModelShape, on_meta, write_weights
from bench.suite.systems.system import program_path

PACKAGES = (
    "accelerate",
    "diffusers",
    "deepspeed",
    "mmgp",
    "transformers",
    "safetensors",
    "triton",
    "numpy",
    "matplotlib",
)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, device, shape = Path(job["folder"]), str(job["device"]), ModelShape(**job["shape"])
    weights = folder / "weights.safetensors"
    made_from = {"shape": dataclasses.asdict(shape), "device": device, "torch": torch.__version__}
    stamp = folder / "made-from.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != made_from:
        stamp.unlink(missing_ok=True)
        for old in (*folder.glob("decoder-t*.pt*"), *folder.glob("output-*.pt")):
            old.unlink()
        write_weights(shape, weights)
        stamp.write_text(json.dumps(made_from))
    for tokens in job["tokens"]:
        path = program_path(folder, tokens)
        if not path.exists():
            _compile(shape, tokens, device, weights, path)
            _share_weights(folder, path)
    program = penstock.read_program(program_path(folder, job["tokens"][0]))
    link = measure_link(device)
    prepared = {
        "environment": environment(device),
        "weight_bytes": program.weight_bytes,
        "link": {
            "bytes_per_s": max(link.values()),
            "by_piece": link,
            "how": "pinned copies" if device.startswith("cuda") else "copies within memory: there is no link",
        },
    }
    Path(sys.argv[2]).write_text(json.dumps(prepared))


def _compile(shape: ModelShape, tokens: int, device: str, weights: Path, path: Path) -> None:
    example = torch.empty(1, tokens, shape.hidden, dtype=DTYPE, device="meta")
    with torch.no_grad():
        program = torch.export.export(on_meta(shape), (example,))
    penstock.compile(penstock.apply_weight_offload(program), path, device=device, weights=weights, overwrite=True)


def _share_weights(folder: Path, path: Path) -> None:
    """Programs for several lengths have the same weights; where the files are the same too, one is enough."""
    identity = penstock.read_program(path).identity
    for other in sorted(folder.glob("decoder-t*.pt2")):
        if other != path and penstock.read_program(other).identity == identity:
            unfinished = path.with_suffix(".link")
            os.link(other.with_suffix(".ptd"), unfinished)
            unfinished.rename(path.with_suffix(".ptd"))
            return


def environment(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "penstock": penstock.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "gpu": None,
        "driver": None,
        "cuda": torch.version.cuda,
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_properties(device).name
        version = Path("/proc/driver/nvidia/version")
        found["driver"] = version.read_text().splitlines()[0] if version.exists() else f"no {version}"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
