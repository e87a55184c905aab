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
ROUNDS = 5
LEAST_RUNS, MOST_RUNS = 3, 200
SYNCHRONISED_RUNS = 10
_SAMPLE_EVERY_S = 0.002


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def time_back_to_back(run: Callable[[], object], device: str, round_s: float) -> Samples:
    """Rounds that last about `round_s` each, so that fast systems are not measured by a handful of runs."""
    once_s = _round(run, 1, device)
    runs = min(max(math.ceil(round_s / once_s), LEAST_RUNS), MOST_RUNS)
    return Samples(tuple(_round(run, runs, device) for _ in range(ROUNDS)), runs)


def time_synchronised(run: Callable[[], object], device: str) -> Samples:
    return Samples(tuple(_round(run, 1, device) for _ in range(SYNCHRONISED_RUNS)), 1)


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
