"""The benchmark suite: the same model, weights and inputs in every system, each in a process of its own.

    python -m bench.suite --out FOLDER [--layers 16] [--tokens 1,2048] [--device cuda]
    python -m bench.suite --out FOLDER --device cpu --small        # a tiny model, on a machine without a GPU
    python -m bench.suite.report FOLDER                            # table and plots once more, from result.json

FOLDER gets result.json (every sample, versions, command), table.md, and the plots; the weights and compiled programs
made there are used again. A run that was cut short, or had a --limit, goes on with --resume: rows that are in
FOLDER/progress.json are not measured again. FOLDER/log.txt has what the processes printed. The GPU must be free of
other users: its memory is read for the whole device.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.suite.children import Bench, Configuration
from bench.suite.model import ModelShape, llama3_8b, small
from bench.suite.progress import Progress
from bench.suite.report import report
from bench.suite.result import Row, footprint_bytes
from bench.suite.systems import CALIBRATED, COMPARED, LRU, PACKED, PLAIN, REFERENCE, RESIDENT, SYSTEMS
from bench.suite.systems.system import System

DEFAULT_BUDGETS = [0.1, 0.25, 0.5, 0.75, 0.9, 1.0]


def main() -> int:
    options = _parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        options.out.resolve(),
        options.device,
        _shape(options.small, options.layers),
        round_s=0.05 if options.small else 0.2,
        timeout_s=options.timeout,
        deadline_s=time.monotonic() + options.limit,
    )
    tokens = options.tokens or ([1, 16] if options.small else [1, 2048])
    chosen = [s for s in SYSTEMS.values() if s.name in options.systems or s in (REFERENCE, RESIDENT)]
    prepared = bench.prepare(
        tokens,
        with_plain=any(system in PLAIN for system in chosen),
        with_packed=any(system in PACKED for system in chosen),
    )
    progress = Progress(options.out / "progress.json", bench, prepared, resume=options.resume)
    # Nothing is compared with these: should the time not suffice, they are what can be missed.
    last = [system for system in chosen if system in (CALIBRATED, LRU)]
    for system in chosen:
        if system not in last:
            progress.run(system, _configurations(system, tokens, options.budgets))
    for mode in COMPARED:
        if mode in chosen:
            progress.run(mode, footprints(progress.rows, mode, tokens))
    for system in last:
        progress.run(system, _configurations(system, tokens, options.budgets))
    return report(bench, prepared, progress.rows)


def _configurations(system: System, tokens: Sequence[int], budgets: Sequence[float]) -> list[Configuration]:
    fractions: Sequence[float | None] = sorted(budgets) if system.budgeted else [None]
    return [Configuration(count, fraction) for count in tokens for fraction in fractions]


def footprints(rows: Sequence[Row], mode: System, tokens: Sequence[int]) -> list[Configuration]:
    """A mode of ours at the footprint of each peer, once each."""
    found = []
    for count in tokens:
        peers = [row for row in rows if row.tokens == count and not SYSTEMS[row.system].ours]
        budgets = {footprint_bytes(rows, mode.name, peer) for peer in peers}
        known = sorted(budget for budget in budgets if budget is not None)
        found += [Configuration(count, budget_bytes=budget, for_comparison=True) for budget in known]
    return found


def _shape(is_small: bool, layers: int | None) -> ModelShape:
    return small(layers or 4) if is_small else llama3_8b(layers or 16)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=_positive, help="16; with --small, 4")
    parser.add_argument("--tokens", type=_tokens, help="comma-separated: 1,2048; with --small, 1,16")
    parser.add_argument(
        "--budgets", type=_budgets, default=DEFAULT_BUDGETS, help="parts of the weights; from 1.0 on all are resident"
    )
    parser.add_argument("--systems", type=_systems, default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier, unfinished run")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds that one process may measure")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="S", help="seconds that all may take together")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _tokens(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def _budgets(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text} must be parts of the weights, such as 0.1,0.5,1.0")
    return values


def _systems(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(SYSTEMS)}")
    return names


def _device(text: str) -> str:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text} is neither cpu nor cuda")
    # With its number, as modules and programs name it.
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"


if __name__ == "__main__":
    sys.exit(main())
