"""Limits of a GPU are measured once and remembered for it; what cannot be right is measured again."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.direct.launch_shape import Limits
from penstock.direct.limits_search import DEVICE_BYTES
from penstock.direct.remembered_limits import gpu_key, known_limits, measured_limits, read_limits, remember_limits
from penstock.runtime import split_limits
from penstock.runtime.split_limits import choose_split_limits

KEY = {"name": "a GPU", "uuid": "0-1-2", "cuda": "13.0"}
FOUND = Limits(host_ctas=2, host_inflight_bytes=128 << 10, link_bytes_per_s=24.5e9, hbm_bytes_per_s=0.9e12)
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(name="a GPU", uuid="0-1-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


class Measure:
    def __init__(self, found: Limits = FOUND) -> None:
        self.found = found
        self.times = 0

    def __call__(self, device: torch.device) -> Limits:
        assert device == GPU
        self.times += 1
        return self.found


def test_a_gpu_is_measured_once() -> None:
    assert gpu_key(GPU) == KEY and read_limits(KEY) is None
    measure = Measure()
    assert [known_limits(GPU, measure, may_measure=True) for _ in range(3)] == [FOUND] * 3
    assert measure.times == 1 and read_limits(KEY) == FOUND
    # Asked for, it is measured again, and that is remembered.
    slower = replace(FOUND, link_bytes_per_s=12e9)
    assert measured_limits(GPU, Measure(slower)) == read_limits(KEY) == slower


@pytest.mark.parametrize("changed", ["name", "uuid", "cuda"])
def test_another_gpu_slot_or_cuda_is_another_one(changed: str) -> None:
    remember_limits(KEY, FOUND)
    assert read_limits({**KEY, changed: "another"}) is None


def test_without_room_nothing_is_measured() -> None:
    measure = Measure()
    assert known_limits(GPU, measure, may_measure=False) is None and not measure.times
    remember_limits(KEY, FOUND)
    assert known_limits(GPU, measure, may_measure=False) == FOUND


def stored(folder: Path) -> Path:
    (path,) = (folder / "cache" / "limits").iterdir()
    return path


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 0},
        {"gpu": {**KEY, "uuid": "another"}},
        {"limits": None},
        {"limits": {**asdict(FOUND), "host_ctas": 0}},
        {"limits": {**asdict(FOUND), "host_ctas": 2.5}},
        {"limits": {**asdict(FOUND), "host_ctas": True}},
        {"limits": {**asdict(FOUND), "link_bytes_per_s": float("nan")}},
        {"limits": {**asdict(FOUND), "hbm_bytes_per_s": 1e30}},
        {"limits": {**asdict(FOUND), "compute_margin": "2"}},
        {"limits": {**asdict(FOUND), "another": 1}},
        {"limits": {"host_ctas": 2}},
    ],
)
def test_what_cannot_be_right_is_measured_again(tmp_path: Path, damage: dict[str, Any]) -> None:
    remember_limits(KEY, FOUND)
    path = stored(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert read_limits(KEY) is None
    assert known_limits(GPU, Measure(), may_measure=True) == FOUND == read_limits(KEY)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\0"])
def test_what_is_no_json_is_measured_again(tmp_path: Path, text: str) -> None:
    remember_limits(KEY, FOUND)
    stored(tmp_path).write_text(text)
    assert read_limits(KEY) is None


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert known_limits(GPU, Measure(), may_measure=True) == FOUND
    assert "limits of a GPU were measured and cannot be remembered" in caplog.text


def test_what_a_module_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Measure()
    monkeypatch.setattr(split_limits, "measure_limits", measure)
    given = choose_split_limits(Limits(host_ctas=1), GPU, 0)
    assert given.limits == Limits(host_ctas=1) and not given.summary and not measure.times
    # The cap holds while it is measured, too.
    small = choose_split_limits(None, GPU, DEVICE_BYTES - 1)
    assert small.limits is None and "those of an H200, because measuring takes" in small.summary[0]
    assert not measure.times
    found = choose_split_limits(None, GPU, DEVICE_BYTES)
    assert found.limits == FOUND and found.summary == (f"measured for split weights: {FOUND}",)
    assert choose_split_limits(None, GPU, 0).limits == FOUND and measure.times == 1
    assert choose_split_limits("measured", GPU, 0).limits == FOUND and measure.times == 2
