"""Real signals during runs, replays, changes of budget, traces and loads on a GPU. No xdist."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import ClosedError
from tests.gpu.test_runtime_cuda import compiled, floor_of, generate, resident, same
from tests.runtime.interruption import Interrupter, interrupted_at, is_pure, places

__all__ = ["compiled", "resident"]  # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIGNALS_EACH = 60


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Subject:
    def __init__(self, path: Path, folder: Path, wanted: list[torch.Tensor], full_bytes: int, cuda_graph: bool) -> None:
        self._path, self._folder, self._wanted, self._cuda_graph = path, folder, wanted, cuda_graph
        floor = floor_of(path, "auto")
        self.low, self.high = (floor + int((full_bytes - floor) * part) for part in (0.2, 0.6))
        self.module = self._load()
        self._token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        self._position = torch.full((1,), 20, device="cuda")

    def _load(self) -> penstock.Module:
        return penstock.Module(self._path, budget=self.low, cuda_graph=self._cuda_graph)

    def run(self) -> None:
        self.module.run_method("decode", self._token, self._position)

    def set_budget(self) -> None:
        self.module.set_budget(self.high if self.module.budget_bytes == self.low else self.low)

    def trace(self) -> None:
        with self.module.trace(self._folder / "trace.json"):
            self.run()

    def load(self) -> None:
        self.module.close()
        self.module = self._load()

    def check(self) -> None:
        try:
            self.module.stats()
        except ClosedError:
            self.module = self._load()
        assert self.module.budget_bytes in (self.low, self.high)
        assert self.module.device_memory()[0] <= self.module.budget_bytes
        assert same(generate(self.module), self._wanted)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_signals(
    compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int], tmp_path: Path, cuda_graph: bool
) -> None:
    subject = Subject(compiled["decoder"], tmp_path, *resident, cuda_graph)
    operations: dict[str, Callable[[], None]] = {
        "run": subject.run,
        "set_budget": subject.set_budget,
        "trace": subject.trace,
        "load": subject.load,
    }
    subject.check()
    free_before = torch.cuda.mem_get_info()[0]
    with Interrupter(seed=7) as interrupter:
        for operation in operations.values():
            subject.run()
            begin = time.perf_counter()
            operation()
            duration_s = time.perf_counter() - begin
            for _ in range(SIGNALS_EACH if operation != subject.load else SIGNALS_EACH // 4):
                interrupter.interrupt(operation, 2 * duration_s)
                subject.check()
    if cuda_graph:
        subject.run()
        assert subject.module.last_run.replays == 1
    if subject.module.budget_bytes != subject.low:
        subject.module.set_budget(subject.low)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # What interrupted loads took they have given back: within what torch and the driver keep for kernels.
    taken_bytes = free_before - torch.cuda.mem_get_info()[0]
    assert taken_bytes < 64 << 20, f"{taken_bytes} bytes, of which torch holds {torch.cuda.memory_reserved()}"
    subject.module.close()


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_at_every_line_of_a_run(
    compiled: dict[str, Path], resident: tuple[list[torch.Tensor], int], tmp_path: Path, cuda_graph: bool
) -> None:
    """With graphs, these are the lines of a replay; the lines of a change of budget end in another capture."""
    subject = Subject(compiled["decoder"], tmp_path, *resident, cuda_graph)
    subject.check()
    subject.run()
    for operation in (subject.run, subject.set_budget):
        for place, at in places(operation):
            if not is_pure(place):
                interrupted_at(operation, place, at)
                subject.check()
    subject.module.close()
