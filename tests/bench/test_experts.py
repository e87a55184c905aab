"""The benchmarks of experts, as far as they run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import expert_rules, experts


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--prompt", "24"], ["--int4"], ["--int4", "--prompt", "24"]])
def test_all_ways_give_the_same_bits(options: list[str], tmp_path: Path) -> None:
    budgets = ["--budgets", "0.0006,0.0018"] if "--int4" not in options else ["--budgets", "0.0005,0.0008"]
    small = ["--out", str(tmp_path), "--small", "--whole", "--tokens", "20", "--stay", "0.6", *budgets]
    assert experts.main([*small, *options]) == 0
    (peaks,) = tmp_path.glob("*.export.json")
    exported = json.loads(peaks.read_text())
    assert exported["methods"] == (["decode", "prefill"] if "--prompt" in options else ["decode"])
    assert 0 < exported["anonymous_host_bytes_before"] <= exported["anonymous_host_peak_bytes"]
    (made,) = (path for path in tmp_path.glob("*.json") if path != peaks)
    rows = json.loads(made.read_text())["rows"]
    ways = {row["way"] for row in rows}
    assert {"resident", "in place", "slots", "by position"} <= ways
    assert any(row["hit_rate"] for row in rows if row["way"] == "slots")


def test_rules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert expert_rules.main(["--tokens", "200", "--rules", "lru,64,clairvoyant"]) == 0
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines()}
    first = {name: float(line.split("|")[2].split(",")[0]) for name, line in rows.items()}
    assert first["lru"] < first["64"] < first["clairvoyant"]
