"""bench.decode_loop on tiny layers: the same bits at every split. And the rates that bench.congestion draws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.congestion import rates
from bench.kv_attention import POSITION_BYTES


def test_rates_are_of_the_bytes_of_each_side() -> None:
    row = {"programs": 4, "seconds": 2e-6, "host_bytes": 3 * POSITION_BYTES, "near_alone_s": 1e-6}
    (found,) = rates({"batch": 2, "length": 5, "by_programs": [row]})
    assert found == pytest.approx((4, 3 * POSITION_BYTES / 2e-6, 7 * POSITION_BYTES / 2e-6, 7 * POSITION_BYTES / 1e-6))


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.decode_loop", "--out", str(tmp_path), "--small", "--device", "cpu"]
    shape = ["--layers", "2", "--lengths", "192,512", "--shares", "0.5", "--tokens", "3"]
    subprocess.run([*command, *shape], check=True, capture_output=True)
    rows = json.loads((tmp_path / "decode-loop.json").read_text())["rows"]
    assert [(row["length"], row["way"]) for row in rows] == [
        (length, way) for length in (192, 512) for way in ("near", "read in place")
    ]
    assert all(row["equal"] for row in rows)
