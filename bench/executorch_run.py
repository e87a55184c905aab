"""A decoder as .pte beside the same one as .pt2, at the same budgets: time a run, GB/s, percent of the link.

    python -m bench.executorch_run --out FOLDER [--layers 16] [--device cuda] [--fractions 0.1,0.5,0.9]
                                   [--cache-mib 1024]

Blocks shaped like Llama-3-8B's, over hidden states (bench/suite/model.py); with --cache-mib, a KV cache of that size is
state of the program, and a run is one step of decoding that attends to all of its positions. Lowers and compiles into
FOLDER what is not there yet, from a model on meta and a checkpoint. ExecuTorch takes and gives tensors in main memory,
so a run of the .pte ends with its result on the host; the .pt2 is timed the same way, and once more back to back. The
link is what copies reached when the module was loaded. Exits with 1 when an output is not, to the bit, that of the .pt2
with everything resident.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
import penstock.executorch
from bench.suite.model import DTYPE, ITEM_BYTES, Decoder, ModelShape, inputs, llama3_8b, on_meta, small, write_weights
from bench.suite.prepare import environment
from penstock.executorch.native import NativeModule

EVERYTHING = "1024TiB"
WARM_UP_RUNS = 3
MIB = 1 << 20


class Cached(nn.Module):
    """forward(x[1, 1, hidden], position[1]) -> [1, 1, hidden]: writes keys and values there, attends up to there."""

    def __init__(self, decoder: Decoder, shape: ModelShape, positions: int) -> None:
        super().__init__()
        # By these names the checkpoint has them.
        self.layers = decoder.layers
        self.shape, self.positions = shape, positions
        for number in range(2 * shape.layers):
            cache = torch.zeros(1, shape.kv_heads, positions, shape.head_dim, dtype=DTYPE)
            self.register_buffer(f"cache_{number}", cache, persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        mask = (torch.arange(self.positions, device=x.device) <= position)[None, None, None]
        for number, block in enumerate(self.layers):
            h = block.attn_norm(x)
            q = block.q(h).view(1, 1, self.shape.heads, self.shape.head_dim).transpose(1, 2)
            for which, linear in enumerate((block.k, block.v)):
                written = linear(h).view(1, 1, self.shape.kv_heads, self.shape.head_dim).transpose(1, 2)
                self.get_buffer(f"cache_{2 * number + which}").index_copy_(2, position, written)
            keys, values = (self.get_buffer(f"cache_{2 * number + which}") for which in range(2))
            attention = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            x = x + block.o(attention.transpose(1, 2).reshape(x.shape))
            h = block.mlp_norm(x)
            x = x + block.down(F.silu(block.gate(h)) * block.up(h))
        return x


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache-mib", type=int, default=0, help="of state; 0: none")
    parser.add_argument(
        "--fractions", type=lambda text: [float(each) for each in text.split(",")], default=[0.1, 0.5, 0.9],
        help="of what all weights take",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="the same graph in kilobytes, for machines without a GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shape = (small if options.small else llama3_8b)(options.layers)
    position_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * ITEM_BYTES
    positions = options.cache_mib * MIB // position_bytes
    package, program = prepare(shape, positions, options.out, options.device)
    given: tuple[Tensor, ...] = (inputs(shape, 1, "cpu"),)
    if positions:
        given = (*given, torch.tensor([positions - 1]))

    with penstock.Module(package, EVERYTHING) as module:
        wanted = module(*(each.to(module.device) for each in given)).cpu()
        floor_bytes, full_bytes = module.floor_bytes, module.budget_bytes
    print(f"{options.layers} layers, one token, cache {positions * position_bytes / 1e9:.2f} GB on {options.device}\n")
    print("| budget | | time | streamed | rate | link | of link | held | equal |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for fraction in options.fractions:
        budget_bytes = max(floor_bytes, int(full_bytes * fraction))
        for row in (
            measured_pt2(package, budget_bytes, given, wanted, options.runs, back_to_back=True),
            measured_pt2(package, budget_bytes, given, wanted, options.runs, back_to_back=False),
            measured_pte(program, budget_bytes, given, wanted, options.runs),
            measured_stock(program, budget_bytes, given, wanted, options.runs),
        ):
            rows.append({"fraction": fraction, "budget_bytes": budget_bytes, **row})
            print(f"| {fraction:.0%} {line(row)}", flush=True)
    stored = {
        "environment": environment(options.device),
        "options": {"layers": options.layers, "cache_mib": options.cache_mib, "runs": options.runs},
        "rows": rows,
    }
    name = f"executorch-run-{options.layers}-{options.cache_mib}.json"
    (options.out / name).write_text(json.dumps(stored, indent=1))
    return int(not all(row["equal"] for row in rows))


def prepare(shape: ModelShape, positions: int, folder: Path, device: str) -> tuple[Path, Path]:
    """Both programs from the same exported one, and so from the same weights."""
    # In folders of their own: each has a .ptd of its name beside it.
    package, program = (folder / ending / f"model-{positions}.{ending}" for ending in ("pt2", "pte"))
    weights = folder / "weights.safetensors"
    if not weights.exists():
        write_weights(shape, weights)
    if package.exists() and program.exists():
        return package, program
    model: nn.Module = on_meta(shape)
    example = (inputs(shape, 1, "meta"),)
    if positions:
        assert isinstance(model, Decoder)
        with torch.device("meta"):
            model = Cached(model, shape, positions).eval()
        example = (*example, torch.empty(1, dtype=torch.int64, device="meta"))
    with torch.no_grad():
        offloaded = penstock.apply_weight_offload(torch.export.export(model, example))
    makers: dict[Path, Callable[..., object]] = {program: penstock.executorch.export, package: penstock.compile}
    for path, make in makers.items():
        if not path.exists():
            started = time.perf_counter()
            path.parent.mkdir(exist_ok=True)
            make(offloaded, path, device=device, weights=weights, overwrite=True)
            print(f"{path.name} made in {time.perf_counter() - started:.0f} s", flush=True)
    return package, program


def measured_pt2(
    path: Path, budget_bytes: int, given: Sequence[Tensor], wanted: Tensor, runs: int, *, back_to_back: bool
) -> dict[str, Any]:
    with penstock.Module(path, budget_bytes) as module:
        near = [each.to(module.device) for each in given]
        take = (lambda: module(*near)) if back_to_back else (lambda: module(*near).cpu())
        name = ".pt2, back to back" if back_to_back else ".pt2, each result on the host"
        seconds = timed(take, runs, module.device)
        return row_of(name, module, seconds, torch.equal(take().cpu(), wanted))


def measured_pte(path: Path, budget_bytes: int, given: Sequence[Tensor], wanted: Tensor, runs: int) -> dict[str, Any]:
    with penstock.executorch.Module(path, budget_bytes) as module:
        seconds = timed(lambda: module(*given), runs, module.device)
        return row_of(".pte, planned at load", module, seconds, torch.equal(module(*given), wanted))


def row_of(name: str, module: Any, seconds: float, equal: bool) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": seconds,
        "bytes_streamed": module.last_run.bytes_streamed,
        "link_bytes_per_s": module.link_bytes_per_s,
        "held_bytes": module.device_memory()[1],
        "equal": equal,
    }


def measured_stock(path: Path, budget_bytes: int, given: Sequence[Tensor], wanted: Tensor, runs: int) -> dict[str, Any]:
    """As a process without Python runs it: the delegate takes one of the plans in the file."""
    native = NativeModule(str(path), [str(path.with_suffix(".ptd"))], str(budget_bytes), "bench")
    try:
        native.load_method("forward")
        session = native.session()
        assert session is not None
        seconds = timed(lambda: native.execute("forward", given), runs, torch.device("cpu"))
        equal = torch.equal(native.execute("forward", given)[0], wanted)
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
    sys.exit(main())
