"""Writes result.json, table.md and the plots."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from bench.suite.children import Bench
from bench.suite.plot import missing as plots_missing
from bench.suite.plot import plot
from bench.suite.result import FAILED, RAN, Row, Yardsticks, compare, derive, row_to_json
from bench.suite.systems import PLANNED, RESIDENT, SYSTEMS
from bench.suite.table import markdown


def report(bench: Bench, prepared: dict[str, Any], rows: Sequence[Row]) -> int:
    """Prints the table too. The exit status: 1 when one of our own modes failed or was wrong."""
    yardsticks = Yardsticks(
        weight_bytes=prepared["weight_bytes"],
        link_bytes_per_s=prepared["link"]["bytes_per_s"],
        resident_s={row.tokens: row.time_s for row in rows if row.system == RESIDENT.name and row.status == RAN},
    )
    comparisons = compare(
        [row for row in rows if not SYSTEMS[row.system].ours], [row for row in rows if row.system == PLANNED.name]
    )
    titles = {name: system.title for name, system in SYSTEMS.items()}
    not_asked_for = [name for name in SYSTEMS if name not in {row.system for row in rows}]
    no_plots = plots_missing()
    plots = [] if no_plots else plot(rows, yardsticks, titles, bench.folder)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    result = {
        "date": date,
        "command": shlex.join(["python", "-m", "bench.suite", *sys.argv[1:]]),
        "device": bench.device,
        "environment": prepared["environment"],
        "model": dataclasses.asdict(bench.shape) | {"dtype": "bfloat16", "weight_bytes": prepared["weight_bytes"]},
        "link": prepared["link"],
        "rows": [row_to_json(row) | {"derived": dataclasses.asdict(derive(row, yardsticks))} for row in rows],
        "comparisons": [dataclasses.asdict(c) | {"times_faster": c.times_faster} for c in comparisons],
        "not_asked_for": not_asked_for,
        "plots": {"files": [path.name for path in plots], "missing": no_plots},
    }
    (bench.folder / "result.json").write_text(json.dumps(result, indent=1))
    text = (
        _heading(bench, prepared, date)
        + _notes(no_plots, not_asked_for)
        + markdown(rows, comparisons, yardsticks, titles)
    )
    (bench.folder / "table.md").write_text(text)
    print(text)
    return int(any(_is_bad(row) for row in rows))


def _is_bad(row: Row) -> bool:
    """Peers may fail or be wrong, and the table says so; we may not."""
    if not SYSTEMS[row.system].ours:
        return False
    wrong = row.outputs is not None and (row.outputs.wrong or not row.outputs.equal_to_resident)
    return row.status == FAILED or wrong


def _heading(bench: Bench, prepared: dict[str, Any], date: str) -> str:
    environment, link, shape = prepared["environment"], prepared["link"], bench.shape
    device = environment["gpu"] or f"CPU ({environment['machine']}, {environment['cpus']} cores)"
    driver = f"{environment['driver']}; " if environment["driver"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    return (
        f"{date[:10]}, {device}; {driver}torch {environment['torch']}, {packages}, Python {environment['python']}.\n"
        f"{shape.layers} layers, hidden {shape.hidden}, feed-forward {shape.ff}, {shape.kv_heads} KV heads, bf16, "
        f"{prepared['weight_bytes']} bytes of weights. Link: {link['bytes_per_s'] / 1e9:.1f} GB/s ({link['how']}).\n"
        "Bound: the larger of the all-resident time and (weights - budget) / link; without a budget, a system's peak "
        "stands for it.\n"
    )


def _notes(no_plots: str, not_asked_for: Sequence[str]) -> str:
    plots = f"Plots were not made: {no_plots}.\n" if no_plots else ""
    systems = f"Not asked for: {', '.join(not_asked_for)}.\n" if not_asked_for else ""
    return plots + systems + "\n"
