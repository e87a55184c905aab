"""bench.startup on a tiny model: that it starts fresh processes, and says what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.startup import Start, _disk

import penstock
from tests.bench.finished import ROOT, Finished


def test_starts_are_repeated_in_fresh_processes(finished: Finished, tmp_path: Path) -> None:
    program = finished.folder / "decoder-t1.pt2"
    out = tmp_path / "startup.json"
    floor_bytes = finished.rows("planned")[0]["floor_bytes"]
    command = [sys.executable, "-m", "bench.startup", str(program), "--budget", str(floor_bytes), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--repeat", "2", "--phases", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text())
    assert stored["weights_file_bytes"] == program.with_suffix(".ptd").stat().st_size
    assert stored["page_cache"] == "warm" and len(stored["starts"]) == 2
    for start in stored["starts"]:
        assert start["budget_bytes"] == floor_bytes
        assert start["weight_bytes"] == penstock.read_program(program).weight_bytes
        assert start["total_s"] == start["load_s"] + start["first_run_s"]
        assert min(start["load_s"], start["first_run_s"], start["second_run_s"]) > 0
        assert start["phases_s"] == {}
    assert stored["phases_s"] and all(seconds >= 0 for seconds in stored["phases_s"].values())
    assert "page cache warm, 2 starts" in done.stdout and "under a profiler" in done.stdout


def test_a_page_cache_that_was_not_cold_is_told() -> None:
    def told(read_bytes: int | None, *, cold: bool) -> str:
        return _disk(Start(1, 1, 1.0, 1.0, 1.0, read_bytes, {}), 1000, cold)

    assert told(0, cold=False) == "0 bytes"
    assert told(1000, cold=True) == "1000 bytes"
    assert told(400, cold=True) == "400 bytes (**not cold**)"
    assert told(None, cold=True) == "not counted by this kernel"
