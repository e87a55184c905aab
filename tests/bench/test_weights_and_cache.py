"""bench.weights_and_cache on tiny layers: how it divides, and that every way gives the same bits. Of times nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.weights_and_cache import WAYS, uniform

from penstock.plan.cache_share import CacheGroup, WeightsRange

WEIGHTS = WeightsRange(floor_bytes=100, full_bytes=1000)
CACHE = CacheGroup(("kv",), capacity=512, position_bytes=2, block_positions=64)


@pytest.mark.parametrize(
    ("room_bytes", "positions"),
    [(2024, 512), (1012, 256), (1011, 192), (506, 128), (227, 0), (228, 0), (400, 64), (100, 0)],
)
def test_the_same_part_of_each_in_whole_blocks(room_bytes: int, positions: int) -> None:
    found = uniform(room_bytes, WEIGHTS, [CACHE])
    assert found.positions == (positions,)
    assert found.weights_bytes == room_bytes - positions * CACHE.position_bytes >= WEIGHTS.floor_bytes


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.weights_and_cache", "--out", str(tmp_path), "--small", "--device", "cpu"]
    shape = ["--layers", "2", "--batch", "2", "--positions", "512", "--ratios", "0,25,90"]
    subprocess.run([*command, *shape], check=True, capture_output=True)
    stored = json.loads((tmp_path / "weights-and-cache.json").read_text())
    points = {(round(point["host_percent"]), point["way"]): point for point in stored["points"]}
    assert {way for _, way in points} == {way.name for way in WAYS} and len(points) == 3 * len(WAYS)
    assert all(point["equal"] for point in points.values() if point["seconds"] is not None)
    assert points[0, "planned"]["device_positions"] == 512 and points[0, "planned"]["bytes_streamed"] == 0
    # Half of the cache is filled: the other half is what the planner leaves on the host first.
    planned, even = points[25, "copied ahead"], points[25, "uniform, copied"]
    assert planned["device_positions"] == 256 < even["device_positions"]
    assert planned["weights_budget_bytes"] > even["weights_budget_bytes"]
    assert planned["bytes_streamed"] < even["bytes_streamed"]
    assert points[90, "copied ahead"]["seconds"] is None
