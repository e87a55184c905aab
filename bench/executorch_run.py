"""A decoder as .pte beside the same one as .pt2, at the same budget: time a run, GB/s, percent of the link.

    python -m penstock.executorch.build
    python -m bench.executorch_run --out FOLDER [--layers 16] [--device cuda] [--fraction 0.5]

Blocks shaped like Llama-3-8B's, over hidden states (bench/suite/model.py). Lowers and compiles into FOLDER what is not
there yet. ExecuTorch takes and gives tensors in main memory, so a run of the .pte ends with its result on the host; the
.pt2 is timed the same way, and once more back to back. The link is what copies reached when the module was loaded.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import penstock
import penstock.executorch
from bench.suite.model import ModelShape, inputs, llama3_8b, load, small, write_weights
from penstock.executorch.native import NativeModule

EVERYTHING = "1024TiB"
WARM_UP_RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--fraction", type=float, default=0.5, help="of what all weights take")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="the same graph in kilobytes, for machines without a GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shape = (small if options.small else llama3_8b)(options.layers)
    prepare(shape, options.out, options.device, options.tokens)
    x = inputs(shape, options.tokens, "cpu")

    package, program = options.out / "model.pt2", options.out / "model.pte"
    with penstock.Module(package, EVERYTHING) as module:
        wanted = module(x.to(module.device)).cpu()
        budget_bytes = max(module.floor_bytes, int(module.budget_bytes * options.fraction))
    rows = [
        measured_pt2(package, budget_bytes, x, wanted, options.runs, back_to_back=True),
        measured_pt2(package, budget_bytes, x, wanted, options.runs, back_to_back=False),
        measured_pte(program, budget_bytes, x, wanted, options.runs),
        measured_stock(program, budget_bytes, x, wanted, options.runs),
    ]
    print(f"{options.layers} layers, {options.tokens} tokens, budget {budget_bytes / 1e9:.2f} GB on {options.device}\n")
    print("| | time | streamed | rate | link | of link | held | equal |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(line(row))
    (options.out / "executorch_run.json").write_text(json.dumps(rows, indent=1))
    assert all(row["equal"] for row in rows), "an output differs from the all-resident one"


def prepare(shape: ModelShape, folder: Path, device: str, tokens: int) -> None:
    """Both programs from the same exported one, and so from the same weights."""
    package, program = folder / "model.pt2", folder / "model.pte"
    if package.exists() and program.exists():
        return
    weights = folder / "weights.safetensors"
    if not weights.exists():
        write_weights(shape, weights)
    model = load(shape, weights, lambda tensor: tensor)
    with torch.no_grad():
        exported = torch.export.export(model, (inputs(shape, tokens, "cpu"),))
    offloaded = penstock.apply_weight_offload(exported)
    if not program.exists():
        started = time.perf_counter()
        penstock.executorch.export(offloaded, program, device=device, overwrite=True)
        print(f"lowered to .pte in {time.perf_counter() - started:.0f} s", flush=True)
    if not package.exists():
        penstock.compile(offloaded, package, device=device, overwrite=True)


def measured_pt2(
    path: Path, budget_bytes: int, x: torch.Tensor, wanted: torch.Tensor, runs: int, *, back_to_back: bool
) -> dict[str, Any]:
    with penstock.Module(path, budget_bytes) as module:
        given = x.to(module.device)
        take = (lambda: module(given)) if back_to_back else (lambda: module(given).cpu())
        name = ".pt2, back to back" if back_to_back else ".pt2, each result on the host"
        seconds = timed(take, runs, module.device)
        return row_of(name, module, seconds, torch.equal(take().cpu(), wanted))


def measured_pte(path: Path, budget_bytes: int, x: torch.Tensor, wanted: torch.Tensor, runs: int) -> dict[str, Any]:
    with penstock.executorch.Module(path, budget_bytes) as module:
        seconds = timed(lambda: module(x), runs, module.device)
        return row_of(".pte, planned at load", module, seconds, torch.equal(module(x), wanted))


def row_of(name: str, module: Any, seconds: float, equal: bool) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": seconds,
        "bytes_streamed": module.last_run.bytes_streamed,
        "link_bytes_per_s": module.link_bytes_per_s,
        "held_bytes": module.device_memory()[1],
        "equal": equal,
    }


def measured_stock(path: Path, budget_bytes: int, x: torch.Tensor, wanted: torch.Tensor, runs: int) -> dict[str, Any]:
    """As a process without Python runs it: the delegate takes one of the plans in the file."""
    native = NativeModule(str(path), [str(path.with_suffix(".ptd"))], str(budget_bytes), "bench")
    try:
        native.load_method("forward")
        session = native.session()
        assert session is not None
        seconds = timed(lambda: native.execute("forward", [x]), runs, torch.device("cpu"))
        equal = torch.equal(native.execute("forward", [x])[0], wanted)
        return {
            "name": f".pte, plan {session[1].plan + 1} of {session[1].plan_count} in the file",
            "seconds": seconds,
            "bytes_streamed": None,
            "link_bytes_per_s": None,
            "held_bytes": session[1].plan_bytes,
            "equal": equal,
        }
    finally:
        native.close()


def timed(take: Callable[[], Any], runs: int, device: torch.device) -> float:
    """Seconds a run. What a run leaves on the device ends before the clock is read."""
    for _ in range(WARM_UP_RUNS):
        take()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(runs):
        take()
    synchronize(device)
    return (time.perf_counter() - started) / runs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def line(row: dict[str, Any]) -> str:
    cells = [row["name"], f"{row['seconds'] * 1e3:.2f} ms"]
    if row["bytes_streamed"] is None or not row["link_bytes_per_s"]:
        cells += ["", "", "", ""]
    else:
        rate = row["bytes_streamed"] / row["seconds"]
        cells += [
            f"{row['bytes_streamed'] / 1e9:.3f} GB",
            f"{rate / 1e9:.1f} GB/s",
            f"{row['link_bytes_per_s'] / 1e9:.1f} GB/s",
            f"{rate / row['link_bytes_per_s']:.0%}",
        ]
    cells += [f"{row['held_bytes'] / 1e9:.3f} GB", "yes" if row["equal"] else "NO"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
