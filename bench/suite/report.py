"""Writes result.json, table.md and the plots; `python -m bench.suite.report FOLDER` does so from a result.json.

That second way is for plots: they can be made on another machine than the one that was measured, where matplotlib is.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.suite.children import Bench
from bench.suite.plot import missing as plots_missing
from bench.suite.plot import plot
from bench.suite.result import FAILED, RAN, Row, Yardsticks, compare, derive, row_from_json, row_to_json
from bench.suite.systems import COMPARED, RESIDENT, SYSTEMS
from bench.suite.table import markdown

RESULT, TABLE = "result.json", "table.md"


def report(bench: Bench, prepared: dict[str, Any], rows: Sequence[Row]) -> int:
    """The exit status: 1 when one of our own modes failed or was wrong."""
    made = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench.suite", *sys.argv[1:]]),
        "device": bench.device,
        "environment": prepared["environment"],
        "model": dataclasses.asdict(bench.shape) | {"dtype": "bfloat16", "weight_bytes": prepared["weight_bytes"]},
        "link": prepared["link"],
    }
    order = list(SYSTEMS)
    write(bench.folder, made, sorted(rows, key=lambda row: order.index(row.system)))
    return int(any(_is_bad(row) for row in rows))


def write(folder: Path, made: dict[str, Any], rows: Sequence[Row]) -> None:
    """`made` is what is known beside the rows. Prints the table too."""
    yardsticks = Yardsticks(
        weight_bytes=made["model"]["weight_bytes"],
        link_bytes_per_s=made["link"]["bytes_per_s"],
        resident_s={row.tokens: row.time_s for row in rows if row.system == RESIDENT.name and row.status == RAN},
    )
    peers = [name for name, system in SYSTEMS.items() if not system.ours]
    comparisons = compare(rows, peers, [mode.name for mode in COMPARED])
    titles = {name: system.title for name, system in SYSTEMS.items()}
    not_asked_for = [name for name in SYSTEMS if name not in {row.system for row in rows}]
    no_plots = plots_missing()
    plots = [] if no_plots else plot(rows, yardsticks, titles, folder)
    result = made | {
        "rows": [row_to_json(row) | {"derived": dataclasses.asdict(derive(row, yardsticks))} for row in rows],
        "comparisons": [
            dataclasses.asdict(c)
            | {"times_faster": c.times_faster, "times_faster_synchronised": c.times_faster_synchronised}
            for c in comparisons
        ],
        "not_asked_for": not_asked_for,
        "plots": {"files": [path.name for path in plots], "missing": no_plots},
    }
    (folder / RESULT).write_text(json.dumps(result, indent=1))
    text = _heading(made) + _notes(no_plots, not_asked_for) + markdown(rows, comparisons, yardsticks, titles)
    (folder / TABLE).write_text(text)
    print(text)


def _is_bad(row: Row) -> bool:
    """Peers may fail or be wrong, and the table says so; we may not."""
    if not SYSTEMS[row.system].ours:
        return False
    wrong = row.outputs is not None and (row.outputs.wrong or not row.outputs.equal_to_resident)
    return row.status == FAILED or wrong


def _heading(made: dict[str, Any]) -> str:
    environment, link, model = made["environment"], made["link"], made["model"]
    device = environment["gpu"] or f"CPU ({environment['machine']}, {environment['cpus']} cores)"
    driver = f"{environment['driver']}; " if environment["driver"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    return (
        f"{made['date'][:10]}, {device}; {driver}torch {environment['torch']}, {packages}, "
        f"Python {environment['python']}.\n"
        f"{model['layers']} layers, hidden {model['hidden']}, feed-forward {model['ff']}, "
        f"{model['kv_heads']} KV heads, bf16, {model['weight_bytes']} bytes of weights. "
        f"Link: {link['bytes_per_s'] / 1e9:.1f} GB/s ({link['how']}).\n"
        "Bound: the larger of the all-resident time and (weights - budget) / link; without a budget, a system's peak "
        "stands for it.\n"
        "Host: how long a call takes to return, on an idle device / behind a call whose work is under way.\n"
    )


def _notes(no_plots: str, not_asked_for: Sequence[str]) -> str:
    plots = f"Plots were not made: {no_plots}.\n" if no_plots else ""
    systems = f"Not asked for: {', '.join(not_asked_for)}.\n" if not_asked_for else ""
    return plots + systems + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.suite.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help=f"holds the {RESULT} of an earlier run")
    folder = parser.parse_args().folder
    stored = json.loads((folder / RESULT).read_text())
    rows = [row_from_json({name: value for name, value in row.items() if name != "derived"}) for row in stored["rows"]]
    made = {name: stored[name] for name in ("date", "command", "device", "environment", "model", "link")}
    write(folder, made, rows)


if __name__ == "__main__":
    main()
