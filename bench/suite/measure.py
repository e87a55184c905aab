"""Clocks and meters: time per forward, the link, the device's free memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch

from bench.suite.result import Samples

WARM_UP_RUNS = 3
# A run that takes longer than a round should is slow: it gets fewer rounds, of one run each.
ROUNDS, SLOW_ROUNDS = 5, 3
LEAST_RUNS, MOST_RUNS = 2, 200
LEAST_SINGLE_RUNS, MOST_SINGLE_RUNS = 3, 10
_SAMPLE_EVERY_S = 0.002


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def wait_for_result(device: str) -> None:
    """As reading an output does: for the stream that it was computed on."""
    if device.startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()


def time_back_to_back(run: Callable[[], object], device: str, round_s: float) -> Samples:
    """Rounds that last about `round_s` each, so that fast systems are not measured by a handful of runs."""
    once_s = _round(run, 1, device)
    if once_s > round_s:
        return Samples(tuple(_round(run, 1, device) for _ in range(SLOW_ROUNDS)), 1)
    runs = min(max(math.ceil(round_s / once_s), LEAST_RUNS), MOST_RUNS)
    return Samples(tuple(_round(run, runs, device) for _ in range(ROUNDS)), runs)


def time_synchronised(run: Callable[[], object], device: str, round_s: float) -> Samples:
    """Each run until its result can be read. What else the device was given to do may still be under way then."""
    synchronize(device)
    seconds: list[float] = []
    wanted = 1
    while len(seconds) < wanted:
        begin = time.perf_counter()
        run()
        wait_for_result(device)
        seconds.append(time.perf_counter() - begin)
        wanted = _single_runs(seconds[0], 2 * round_s)
    return Samples(tuple(seconds), 1)


def time_host(run: Callable[[], object], device: str, round_s: float) -> tuple[Samples, Samples]:
    """How long a call takes to return: on an idle device, and right behind a call whose work is still under way.

    In pairs with a wait after each, and not in a row: a device takes only so many launches before it makes the host
    wait, and that wait would be counted.
    """
    alone: list[float] = []
    behind: list[float] = []
    wanted = 1
    while len(alone) < wanted:
        synchronize(device)
        begin = time.perf_counter()
        run()
        first = time.perf_counter()
        run()
        second = time.perf_counter()
        synchronize(device)
        alone.append(first - begin)
        behind.append(second - first)
        wanted = _single_runs((time.perf_counter() - begin) / 2, round_s)
    return Samples(tuple(alone), 1), Samples(tuple(behind), 1)


def _single_runs(once_s: float, total_s: float) -> int:
    return min(max(math.ceil(total_s / once_s), LEAST_SINGLE_RUNS), MOST_SINGLE_RUNS)


def _round(run: Callable[[], object], runs: int, device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    synchronize(device)
    return (time.perf_counter() - begin) / runs


def measure_link(device: str) -> dict[str, float]:
    """Bytes per second from pinned host memory by piece size; without a GPU, of copies within memory."""
    on_cuda = device.startswith("cuda")
    megabytes = (16, 64, 256) if on_cuda else (16,)
    rates = {}
    for size in megabytes:
        nbytes = size << 20
        host = torch.ones(nbytes, dtype=torch.uint8).pin_memory() if on_cuda else torch.ones(nbytes, dtype=torch.uint8)
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)

        def copy(there: torch.Tensor = there, host: torch.Tensor = host) -> None:
            there.copy_(host, non_blocking=True)

        runs = max(4, (1 << 30) // nbytes) if on_cuda else 4
        copy()
        rates[f"{size} MiB"] = nbytes / sorted(_round(copy, runs, device) for _ in range(3))[1]
    return rates


class DeviceMeter:
    """The least free memory of the device, as its driver tells, between reset() and peak_bytes().

    What was free when the process had made its context is the zero. Other users of the device would be counted.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        torch.zeros(1, device=device)
        synchronize(device)
        torch.cuda.empty_cache()
        self._free_at_first_bytes = self._free_bytes()
        self._least_bytes = self._free_at_first_bytes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._least_bytes = self._free_bytes()

    def __enter__(self) -> DeviceMeter:
        """Samples in a thread; not to be used while times are taken, which it would disturb."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        self.sample()

    def sample(self) -> None:
        self._least_bytes = min(self._least_bytes, self._free_bytes())

    def peak_bytes(self) -> int:
        self.sample()
        return self._free_at_first_bytes - self._least_bytes

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self.sample()

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])
