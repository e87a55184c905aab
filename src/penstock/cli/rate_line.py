"""Measures how long runs take, and shows a line on the terminal while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.live import Live
from rich.text import Text

from penstock.cli.call_arguments import Arguments
from penstock.cli.output import console
from penstock.cli.units import short_rate

# Reading the counters waits for the device, which back-to-back runs must not do. So: seldom, and on a terminal only.
_LINE_EVERY_S = 0.25


def time_runs(
    module: Any, method: str, arguments: Arguments, repeat: int, tick: Callable[[], None]
) -> tuple[float, float | None, Any]:
    """Seconds of the first run, mean seconds of the others, and the result of the last."""

    def timed(runs: int) -> tuple[float, Any]:
        began_s = time.perf_counter()
        for _ in range(runs):
            result = module.run_method(method, *arguments[0], **arguments[1])
            tick()
        _wait(module)
        return (time.perf_counter() - began_s) / runs, result

    first_run_s, result = timed(1)
    if repeat == 1:
        return first_run_s, None, result
    del result  # the device may not have room for two results
    run_s, result = timed(repeat - 1)
    return first_run_s, run_s, result


def _wait(module: Any) -> None:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)


@contextmanager
def rate_line(module: Any, live: bool) -> Iterator[Callable[[], None]]:
    """One line on a terminal: how fast the weights come in, and how much of the link that is."""
    screen = console(stderr=True)
    if not live or not screen.is_terminal:
        yield lambda: None
        return
    link = module.link_bytes_per_s
    began_s = shown_s = time.perf_counter()
    seen_bytes = runs_done = 0
    with Live(console=screen, transient=True, auto_refresh=False) as line:

        def tick() -> None:
            nonlocal shown_s, seen_bytes, runs_done
            runs_done += 1
            if time.perf_counter() - shown_s < _LINE_EVERY_S:
                return
            streamed_bytes = module.stats().bytes_streamed
            now_s = time.perf_counter()  # the counters have waited for what they count
            rate = (streamed_bytes - seen_bytes) / (now_s - shown_s)
            part = "" if not link else f", {rate / link:.0%} of the link's {short_rate(link)}"
            line.update(Text(f"{runs_done} runs in {now_s - began_s:.1f} s: {short_rate(rate)}{part}"), refresh=True)
            shown_s, seen_bytes = now_s, streamed_bytes

        yield tick
