"""bench.prediction on a tiny model: what it prints and stores. Of times on a CPU nothing is asked."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from bench.prediction import _shape

import penstock
from penstock.plan.calibration import lower_bound_s
from tests.bench.finished import ROOT, Finished


def test_each_budget_is_measured_simulated_and_bounded(finished: Finished, tmp_path: Path) -> None:
    program = finished.folder / "decoder-t1.pt2"
    out = tmp_path / "prediction.json"
    command = [sys.executable, "-m", "bench.prediction", str(program), "--device", "cpu", "--round", "0.01"]
    done = subprocess.run(
        [*command, "--budgets", "0.1,0.15,0.5,0.9", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text())
    weight_bytes = penstock.read_program(program).weight_bytes
    lowest, half, most = stored["rows"]  # two budgets below the floor make one row
    assert lowest["budget_bytes"] == lowest["floor_bytes"]
    assert half["budget_bytes"] == weight_bytes // 2 and most["budget_bytes"] == int(0.9 * weight_bytes)
    for row in stored["rows"]:
        assert row["equal"] is True
        assert weight_bytes - row["budget_bytes"] <= row["bytes_streamed"] <= weight_bytes
        for name in ("before_s", "measured_s", "simulated_s", "measured_synchronised_s", "simulated_synchronised_s"):
            assert 0 < row[name] < math.inf
        # A host that takes time makes no run shorter, but for what a mean over some runs leaves open.
        assert row["simulated_s"] >= 0.99 * row["simulated_without_host_s"] > 0
        assert row["bound_s"] == lower_bound_s(
            weight_bytes=weight_bytes,
            budget_bytes=row["budget_bytes"],
            resident_s=stored["resident_s"],
            link_bytes_per_s=row["link_bytes_per_s"],
        )
        assert row["bytes_per_s"] == row["bytes_streamed"] / row["measured_s"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3 and {line.count("|") for line in lines} == {16}
    assert "the floor" in lines[2]


def test_tokens_are_for_a_dimension_that_is_not_fixed(finished: Finished) -> None:
    (method,) = penstock.read_program(finished.folder / "decoder-t1.pt2").methods
    assert _shape(method, None) == [1, 1, 128]
    with pytest.raises(SystemExit, match="--tokens is for one dynamic dimension, and it has 0"):
        _shape(method, 8)
