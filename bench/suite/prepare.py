"""Makes what all systems share: the weights file, the compiled programs, the link's bandwidth, the versions.

Run as a process of its own: `python -m bench.suite.prepare JOB.json RESULT.json`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import penstock
from bench.suite.measure import measure_link
from bench.suite.model import DTYPE, ModelShape, on_meta, write_weights
from bench.suite.systems.aotinductor import compile_plain, plain_program_path
from bench.suite.systems.dfloat11_model import ENCODED
from bench.suite.systems.system import packed_path, program_path

PACKAGES = (
    "accelerate",
    "diffusers",
    "deepspeed",
    "mmgp",
    "dfloat11",
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
        for pattern in ("decoder-t*.pt*", "plain-t*.pt2", "output-*.pt", ENCODED):
            for old in folder.glob(pattern):
                old.unlink()
        write_weights(shape, weights)
        stamp.write_text(json.dumps(made_from))
    _compile_missing(shape, job["tokens"], device, weights, with_plain=job["with_plain"])
    if job["with_packed"]:
        _pack_missing([program_path(folder, count) for count in job["tokens"]])
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


def _compile_missing(shape: ModelShape, tokens: Sequence[int], device: str, weights: Path, *, with_plain: bool) -> None:
    """Side by side, each in a process of its own: most of the time is one C++ compiler's for each."""
    left = [count for count in tokens if not program_path(weights.parent, count).exists()]
    plain = [count for count in tokens if with_plain and not plain_program_path(weights.parent, count).exists()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=max(1, len(left) + len(plain)), mp_context=context) as processes:
        started = [processes.submit(_compile, shape, count, device, weights) for count in left]
        started += [processes.submit(compile_plain, shape, count, device, weights) for count in plain]
        for done in started:
            done.result()
    for count in left:
        _share_weights(weights.parent, program_path(weights.parent, count))


def _compile(shape: ModelShape, tokens: int, device: str, weights: Path) -> None:
    path = program_path(weights.parent, tokens)
    example = torch.empty(1, tokens, shape.hidden, dtype=DTYPE, device="meta")
    with torch.no_grad():
        program = torch.export.export(on_meta(shape), (example,))
    penstock.compile(penstock.apply_weight_offload(program), path, device=device, weights=weights, overwrite=True)


def _pack_missing(programs: Sequence[Path]) -> None:
    """Where programs share a weights file, they share the packed one too."""
    for path in programs:
        if packed_path(path).exists():
            continue
        weights = path.with_suffix(".ptd")
        packed = [other for other in programs if packed_path(other).exists()]
        same = [other for other in packed if weights.samefile(other.with_suffix(".ptd"))]
        if same:
            os.link(packed_path(same[0]), packed_path(path))
        else:
            penstock.pack(weights, packed_path(path), program=path)


def _share_weights(folder: Path, path: Path) -> None:
    """Programs for several lengths have the same weights; where the files are the same too, one is enough."""
    identity = penstock.read_program(path).identity
    for other in sorted(folder.glob("decoder-t*.pt2")):
        if other != path and penstock.read_program(other).identity == identity:
            shared, own = other.with_suffix(".ptd"), path.with_suffix(".ptd")
            # Two names of one file: a rename of one to the other does nothing, and leaves both.
            if not own.exists() or not own.samefile(shared):
                unfinished = path.with_suffix(".link")
                unfinished.unlink(missing_ok=True)
                os.link(shared, unfinished)
                unfinished.rename(own)
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
        number = re.search(r"\d+\.\d+(\.\d+)?", version.read_text()) if version.exists() else None
        found["driver"] = number.group() if number else f"not in {version}"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
