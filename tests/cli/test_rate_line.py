"""The line on the terminal, on a clock and with counters of the test's own."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from rich.console import Console

import penstock.cli.rate_line as file
from penstock.cli.rate_line import rate_line, time_runs


@dataclass
class Clock:
    now_s: float = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@dataclass
class FakeModule:
    """Streams 1 GB in each run, which takes half a second."""

    clock: Clock
    runs: int = 0
    asked: int = 0
    link_bytes_per_s: float | None = 4e9
    device: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(type="cpu"))

    def run_method(self, method: str, *arguments: object, **keywords: object) -> int:
        self.runs += 1
        self.clock.now_s += 0.5
        return self.runs

    def stats(self) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(bytes_streamed=self.runs * 10**9)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    clock = Clock()
    monkeypatch.setattr(file, "time", clock)
    return FakeModule(clock)


def screen(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    said = io.StringIO()
    made = Console(file=said, force_terminal=terminal, width=120, markup=False, highlight=False)
    monkeypatch.setattr(file, "console", lambda stderr: made)
    return said


def test_the_line(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    said = screen(monkeypatch, terminal=True)
    with rate_line(module, live=True) as tick:
        first_s, each_s, last = time_runs(module, "forward", ((), {}), 3, tick)
    assert (first_s, each_s, last) == (0.5, 0.5, 3)
    for line in ("1 runs in 0.5 s", "2 runs in 1.0 s", "3 runs in 1.5 s"):
        assert f"{line}: 2.00 GB/s, 50% of the link's 4.00 GB/s" in said.getvalue()


@pytest.mark.parametrize(("live", "terminal"), [(True, False), (False, True)])
def test_nothing_is_asked_where_nothing_is_shown(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, live: bool, terminal: bool
) -> None:
    said = screen(monkeypatch, terminal=terminal)
    with rate_line(module, live) as tick:
        assert time_runs(module, "forward", ((), {}), 1, tick) == (0.5, None, 1)
    assert module.asked == 0 and said.getvalue() == "", "reading the counters waits for the device"


def test_a_line_seldom(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    screen(monkeypatch, terminal=True)
    monkeypatch.setattr(file, "_LINE_EVERY_S", 2.0)
    with rate_line(module, live=True) as tick:
        time_runs(module, "forward", ((), {}), 9, tick)
    assert module.asked == 2
