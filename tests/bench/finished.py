"""One run of the benchmark suite with a tiny model, which the tests of this folder look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FRACTIONS = (0.1, 0.5, 1.0)


class Finished(NamedTuple):
    folder: Path
    result: dict[str, Any]
    table: str

    def rows(self, system: str, *, for_comparison: bool = False) -> list[dict[str, Any]]:
        return [
            row
            for row in self.result["rows"]
            if row["system"] == system and row["for_comparison"] == for_comparison and row["status"] == "ran"
        ]


def suite(folder: Path, *arguments: str) -> Finished:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.suite",
            "--out",
            str(folder),
            "--device",
            "cpu",
            "--small",
            "--layers",
            "2",
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (folder / "table.md").read_text()
    assert table in done.stdout
    return Finished(folder, json.loads((folder / "result.json").read_text()), table)
