"""Loads, runs and closes the same program again and again, ours and a stock AOTInductor package of the same model, and
prints what each has left behind: `python -m tests.runtime.leaks 1000 FOLDER`, where compiled programs go and are found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import penstock
from tests.runtime.footprint import footprint
from tests.runtime.modules import CHAIN_WIDTH, COMPILERS, Chain, floor_of, random_input

X = random_input(3, CHAIN_WIDTH, seed=3)
WARMING_LOADS = 20


def penstock_loads(folder: Path) -> Callable[[], None]:
    path = folder / "model.pt2"
    if not path.exists():
        COMPILERS["chain"](folder)
    budget = floor_of(path)

    def load() -> None:
        with penstock.Module(path, budget) as module:
            module(X)

    return load


def stock_loads(folder: Path) -> Callable[[], None]:
    path = folder / "stock.pt2"
    if not path.exists():
        model = Chain().eval().requires_grad_(False)
        rows = torch.export.Dim("rows")
        exported = torch.export.export(model, (torch.ones(3, CHAIN_WIDTH),), dynamic_shapes=({0: rows},))
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))

    def load() -> None:
        torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1).run([X])

    return load


def measure(load: Callable[[], None], times: int) -> None:
    for _ in range(WARMING_LOADS):
        load()
    before = footprint()
    for _ in range(times):
        load()
    after = footprint()
    mappings = after.mappings - before.mappings + after.anonymous_mappings - before.anonymous_mappings
    unpacked = after.unpacked_mappings - before.unpacked_mappings
    kept_bytes = after.anonymous_bytes - before.anonymous_bytes
    print(
        f"  after {times} loads and closes: descriptors {after.descriptors - before.descriptors:+d}, threads "
        f"{after.threads - before.threads:+d}, mappings {mappings:+d} ({unpacked:+d} of unpacked libraries), anonymous "
        f"memory {kept_bytes / 1e6:+.1f} MB ({kept_bytes / times / 1e3:.0f} kB a load)",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("penstock", "stock"))
    arguments = parser.parse_args()
    if arguments.only is None:
        # Each in a process of its own: what one leaves is not the other's.
        return max(
            subprocess.run([sys.executable, "-m", "tests.runtime.leaks", *sys.argv[1:], "--only", one]).returncode
            for one in ("penstock", "stock")
        )
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    load = penstock_loads(arguments.folder) if arguments.only == "penstock" else stock_loads(arguments.folder)
    print(f"{arguments.only}, torch {torch.__version__}", flush=True)
    measure(load, arguments.times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
