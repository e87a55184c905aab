"""Starts the processes of the suite, and turns one that dies into rows that say so."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.suite.model import ModelShape
from bench.suite.result import FAILED, Row, row_from_json
from bench.suite.systems.system import System


@dataclass(frozen=True)
class Configuration:
    tokens: int
    budget_fraction: float | None = None
    budget_bytes: int | None = None
    for_comparison: bool = False


@dataclass(frozen=True)
class Bench:
    """What all processes of one run of the suite are told."""

    folder: Path
    device: str
    shape: ModelShape
    # How long one round of back-to-back runs takes, about; and what a process that measures may take in all.
    round_s: float
    timeout_s: float
    # Of time.monotonic(): when the whole run must have ended.
    deadline_s: float = math.inf

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def prepare(self, tokens: Sequence[int], *, with_plain: bool, with_packed: bool) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch) / "prepared.json"
            job = {"tokens": list(tokens), "with_plain": with_plain, "with_packed": with_packed}
            died = self._run("bench.suite.prepare", job, result, self.left_s)
            if died:
                raise SystemExit(f"the model could not be prepared: {died}")
            return dict(json.loads(result.read_text()))

    def measure(self, system: System, configurations: Sequence[Configuration], weight_bytes: int) -> list[Row]:
        groups = [configurations] if system.shares_process else [[one] for one in configurations]
        return [row for group in groups for row in self._measure(system, group, weight_bytes)]

    def _measure(self, system: System, group: Sequence[Configuration], weight_bytes: int) -> list[Row]:
        job = {
            "system": system.name,
            "weight_bytes": weight_bytes,
            "configurations": [dataclasses.asdict(configuration) for configuration in group],
        }
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch) / "rows.jsonl"
            died = self._run("bench.suite.worker", job, result, min(self.timeout_s, self.left_s))
            lines = result.read_text().splitlines() if result.exists() else []
        rows = [row_from_json(json.loads(line)) for line in lines]
        lost = [
            Row(
                system=system.name,
                tokens=configuration.tokens,
                status=FAILED,
                reason=died,
                budget_fraction=configuration.budget_fraction,
                budget_bytes=configuration.budget_bytes,
                for_comparison=configuration.for_comparison,
            )
            for configuration in group[len(rows) :]
        ]
        return [*rows, *lost]

    def _run(self, module: str, job: dict[str, Any], result: Path, timeout_s: float) -> str:
        """Empty, or how it died. What it prints is added to log.txt in the folder."""
        path = result.with_name("job.json")
        common = {
            "folder": str(self.folder),
            "device": self.device,
            "shape": dataclasses.asdict(self.shape),
            "round_s": self.round_s,
        }
        path.write_text(json.dumps(common | job))
        log = result.with_name("log.txt")
        command = [sys.executable, "-m", module, str(path), str(result)]
        limit_s = None if timeout_s == math.inf else max(0.0, timeout_s)
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        text = log.read_text(errors="replace")
        with (self.folder / "log.txt").open("a") as kept:
            kept.write(f"---- {module} {json.dumps(job)}\n{text}")
        if code == 0:
            return ""
        sys.stderr.write(text)
        if code is None:
            return f"the process took longer than the {timeout_s:.0f} s that it had"
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
        return f"the process ended with code {code}: {last}"
