"""The generation bench: peers get as much memory as Penstock was seen to take, and rows say what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import generation

GB = 10**9


class Peer:
    """Takes more than its limit by a fixed amount, and is the faster the more it has."""

    def __init__(self, beside_bytes: int, unit_bytes: int = 1) -> None:
        self.beside_bytes, self.unit_bytes = beside_bytes, unit_bytes
        self.limits: list[int] = []

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        limit = job["max_memory_bytes"]
        self.limits.append(limit)
        used = limit // self.unit_bytes * self.unit_bytes
        return {"peak_bytes": used + self.beside_bytes, "ms_a_token": 1e12 / max(used, 1)}


@pytest.mark.parametrize("beside_bytes", [0, GB // 2, 2 * GB])
def test_a_peer_comes_close_to_the_peak_and_not_above_it(monkeypatch: pytest.MonkeyPatch, beside_bytes: int) -> None:
    peer = Peer(beside_bytes)
    monkeypatch.setattr(generation, "run", peer)
    row = generation.within({"system": "device_map"}, 8 * GB)
    assert 8 * GB * (1 - generation.CLOSE) <= row["peak_bytes"] <= 8 * GB
    assert len(peer.limits) <= 3 and row["max_memory_bytes"] in peer.limits


def test_a_peer_that_moves_in_large_steps_is_taken_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(0, unit_bytes=3 * GB)
    monkeypatch.setattr(generation, "run", peer)
    assert generation.within({"system": "device_map"}, 8 * GB)["peak_bytes"] == 6 * GB
    assert len(peer.limits) == 3


def test_a_peer_that_cannot_be_made_to_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "run", Peer(10 * GB))
    assert "stayed above" in generation.within({"system": "pinned"}, 8 * GB)["note"]


def test_a_failure_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "run", lambda job: {"system": job["system"], "failed": "out of memory"})
    row = generation.within({"system": "pinned"}, 8 * GB) | {"fraction": 0.5}
    assert generation.line(row, 16 * GB) == "50% pinned: out of memory"


def test_the_checkpoint_is_one_that_transformers_opens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    generation.write_checkpoint("tiny", None, tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    index = json.loads((tmp_path / "tiny" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    first, second = (layer.mlp.up_proj.weight for layer in model.model.layers)
    assert first.dtype == torch.bfloat16 and not torch.equal(first, second)
    assert len(torch.unique(first, dim=0)) == len(first)
