"""The rows measured so far, on disk after every system, so that a run that is cut short can go on."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.suite.children import Bench, Configuration
from bench.suite.result import MISSING, RAN, REPEATED, Row, row_from_json, row_to_json
from bench.suite.systems.system import System

OUT_OF_TIME = "not measured: the run had reached its limit"


class Progress:
    def __init__(self, path: Path, bench: Bench, prepared: dict[str, Any], *, resume: bool) -> None:
        self._path = path
        self._bench = bench
        self._weight_bytes = int(prepared["weight_bytes"])
        self._measured_on = {
            "shape": dataclasses.asdict(bench.shape),
            "device": bench.device,
            "environment": prepared["environment"],
        }
        self.rows: list[Row] = self._earlier() if resume and path.exists() else []

    def _earlier(self) -> list[Row]:
        """What ran. The rest is tried again."""
        stored = json.loads(self._path.read_text())
        if stored["measured_on"] != self._measured_on:
            raise SystemExit(
                f"{self._path} was measured on {stored['measured_on']}, and this is {self._measured_on}: run without "
                "--resume, or in another folder"
            )
        rows = [row_from_json(row) for row in stored["rows"]]
        return [row for row in rows if row.status in (RAN, REPEATED)]

    def run(self, system: System, configurations: Sequence[Configuration]) -> None:
        done = {_place(row) for row in self.rows if row.system == system.name}
        left = [configuration for configuration in configurations if _place(configuration) not in done]
        if not left:
            return
        reason = system.missing(self._bench.device)
        if not reason and self._bench.left_s <= 0:
            reason = OUT_OF_TIME
        if reason:
            lost = dict.fromkeys((c.tokens, c.for_comparison) for c in left)
            rows = [Row(system.name, tokens, MISSING, reason, for_comparison=also) for tokens, also in lost]
        else:
            rows = self._bench.measure(system, left, self._weight_bytes)
        self.rows += rows
        stored = {"measured_on": self._measured_on, "rows": [row_to_json(row) for row in self.rows]}
        self._path.write_text(json.dumps(stored, indent=1))
        for row in rows:
            told = f"{row.time_s * 1e3:.2f} ms" if row.status == RAN else f"{row.status}: {row.reason}"
            budget = "" if row.budget_bytes is None else f", budget {row.budget_bytes} bytes"
            print(f"{system.title}, tokens {row.tokens}{budget}: {told}", file=sys.stderr, flush=True)


def _place(one: Row | Configuration) -> tuple[int, bool, float | None]:
    """What tells configurations of one system apart. A part of the weights becomes bytes only when it is run."""
    return one.tokens, one.for_comparison, one.budget_bytes if one.for_comparison else one.budget_fraction
