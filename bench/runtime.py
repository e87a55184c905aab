"""One decoding step at several budgets, planned and least-recently-used, beside the bound of the link.

    python -m bench.runtime --out FOLDER [--layers 8] [--device cuda]

Compiles a decoder shaped like Llama-3-8B (fewer layers) into FOLDER unless it is there, checks that every output equals
the all-resident one to the bit, and prints a table. The bound is (weights - budget) / link, with the link measured by
the module itself at load; it does not count the ring, which no streaming can do without.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from examples import decoder

import penstock

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
WAYS = (("auto", "registered"), ("auto", "1GiB"), ("lru", "registered"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ff", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    path = options.out / "model.pt2"
    if not path.exists():
        _compile(options, path)

    inputs = (
        torch.zeros(1, 1, dtype=torch.int64, device=options.device),
        torch.full((1,), 8, device=options.device),
    )
    with penstock.Module(path, budget="1TiB") as module:
        wanted = module.run_method("decode", *inputs)
        full_bytes, floor_bytes = module.budget_bytes, module.floor_bytes
        resident_s, host_s = _time(module, inputs, options.runs)
    print(f"all resident: {resident_s * 1e3:.2f} ms a run, of which the host takes {host_s * 1e3:.2f} ms\n")
    print(
        "| placement, host memory | budget | time | bound | streamed | rate | of link | host | stall | pool calls "
        "| pool time | equal |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for placement, host_memory in WAYS:
        for fraction in FRACTIONS:
            if fraction and fraction * full_bytes <= floor_bytes:
                continue  # the row at the floor stands for it
            row = _measure(path, placement, host_memory, int(full_bytes * fraction), wanted, inputs, options.runs)
            rows.append(row | {"resident_s": resident_s})
            print(_line(row), flush=True)
    (options.out / "runtime.json").write_text(json.dumps(rows, indent=1))


def _compile(options: argparse.Namespace, path: Path) -> None:
    config = decoder.DecoderConfig(
        hidden=options.hidden,
        ff=options.ff,
        layers=options.layers,
        heads=options.hidden // 128,
        kv_heads=options.hidden // 512,
        vocab=options.vocab,
        max_len=256,
        dtype=torch.bfloat16,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    case = decoder.methods(config)["decode"]
    program = penstock.apply_weight_offload(decoder.export(case))
    penstock.compile({"decode": program}, path, device=options.device)


def _time(module: penstock.Module, inputs: tuple[torch.Tensor, ...], runs: int) -> tuple[float, float]:
    """Seconds per run back to back, and of these the host's."""
    for _ in range(3):
        module.run_method("decode", *inputs)
    _synchronize(module.device)
    begin = time.perf_counter()
    for _ in range(runs):
        module.run_method("decode", *inputs)
    issued = time.perf_counter()
    _synchronize(module.device)
    return (time.perf_counter() - begin) / runs, (issued - begin) / runs


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure(
    path: Path,
    placement: str,
    host_memory: str,
    budget_bytes: int,
    wanted: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    runs: int,
) -> dict[str, object]:
    try:
        module = penstock.Module(path, budget=budget_bytes, placement=placement, host_memory=host_memory)
    except penstock.errors.BelowFloorError as error:
        module = penstock.Module(path, budget=error.floor_bytes, placement=placement, host_memory=host_memory)
    with module:
        equal = all(torch.equal(module.run_method("decode", *inputs), wanted) for _ in range(3))
        seconds, host_s = _time(module, inputs, runs)
        last, link = module.last_run, module.link_bytes_per_s or float("nan")
        return {
            "placement": placement,
            "host_memory": host_memory,
            "budget_bytes": module.budget_bytes,
            "peak_device_bytes": module.device_memory()[1],
            "weight_bytes": module.weight_bytes,
            "seconds": seconds,
            "host_seconds": host_s,
            "bound_seconds": (module.weight_bytes - module.budget_bytes) / link,
            "link_bytes_per_s": link,
            "bytes_streamed": last.bytes_streamed,
            "copies": last.copies,
            "stall_seconds": last.stall_ns / 1e9,
            "pool_calls": last.pool_calls,
            "pool_seconds": last.pool_ns / 1e9,
            "equal": equal,
        }


def _line(row: dict) -> str:  # type: ignore[type-arg]
    rate = row["bytes_streamed"] / row["seconds"]
    return (
        f"| {row['placement']}, {row['host_memory']} | {row['budget_bytes'] / row['weight_bytes']:.0%} "
        f"({row['budget_bytes'] / 1e9:.2f} GB) | {row['seconds'] * 1e3:.2f} ms | {row['bound_seconds'] * 1e3:.2f} ms "
        f"| {row['bytes_streamed'] / 1e9:.2f} GB, {row['copies']} copies | {rate / 1e9:.1f} GB/s "
        f"| {rate / row['link_bytes_per_s']:.0%} | {row['host_seconds'] * 1e3:.2f} ms "
        f"| {row['stall_seconds'] * 1e3:.2f} ms | {row['pool_calls']} | {row['pool_seconds'] * 1e6:.0f} us "
        f"| {'yes' if row['equal'] else 'NO'} |"
    )


if __name__ == "__main__":
    main()
