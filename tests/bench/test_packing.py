"""bench.packing writes down what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import packing


def test_the_figures_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WEIGHT_MIB", 1)
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["packing", str(tmp_path), "--mib", "2", "--times", "2", "--json", str(out)])
    assert packing.main() == 0
    stored = json.loads(out.read_text())
    assert [each["what"] for each in stored["passes"]] == ["pack", "unpack"] * 2
    assert all(each["seconds"] > 0 for each in stored["passes"])
    assert 2 << 20 < stored["raw_bytes"] < (2 << 20) + 8192
    assert 0.66 < stored["packed_bytes"] / stored["raw_bytes"] < 0.7
    assert list(tmp_path.iterdir()) == [out]
