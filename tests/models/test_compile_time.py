"""Time left while compiling."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from penstock.models.compile_time import BASE_S, LAYER_S, CompileTime, countdown, past_times, predicted_s, write_time
from penstock.store.store import Store

KEY = {"device": "cpu", "machine": "m", "torch": "2", "inductor_configs": {}}


def _make(store: Store, key: dict[str, object], taken: CompileTime) -> Path:
    return store.entry("programs", key, lambda folder: write_time(folder, taken), lambda line: None)


def test_a_machine_is_as_fast_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert past_times(store.list(), KEY) == []
    assert predicted_s(8, []) == BASE_S + 8 * LAYER_S
    slow = CompileTime(16, 2 * (BASE_S + 16 * LAYER_S))
    _make(store, {**KEY, "model": "a"}, slow)
    _make(store, {**KEY, "model": "b", "device": "cuda"}, CompileTime(16, 1.0))
    store.entry("programs", {**KEY, "model": "c"}, lambda folder: None, lambda line: None)
    assert past_times(store.list(), KEY) == [slow]
    assert predicted_s(8, [slow]) == pytest.approx(2 * (BASE_S + 8 * LAYER_S))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"layers": "a", "seconds": {}}', '{"layers": 1, "seconds": 2, "more": 3}']
)
def test_a_damaged_time_says_nothing(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    (_make(store, KEY, CompileTime(1, 1.0)) / "compile-time.json").write_text(text)
    assert past_times(store.list(), KEY) == []


@pytest.mark.parametrize(("total_s", "text"), [(1000.0, r"about \d+ s left"), (-100.0, r"\d+ s longer than expected")])
def test_the_countdown_is_told_until_the_end(total_s: float, text: str) -> None:
    told: list[str] = []
    twice = threading.Event()

    def say(line: str) -> None:
        told.append(line)
        if len(told) == 2:
            twice.set()

    with countdown(total_s, say, every_s=0.01):
        assert twice.wait(60)
    after = len(told)
    assert all(re.search(text, line) for line in told[:2])
    assert not any(thread.name == "penstock-countdown" for thread in threading.enumerate()) and len(told) == after
