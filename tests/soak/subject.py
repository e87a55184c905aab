"""One module under test, what is known about it, and what must hold after whatever was done to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import penstock
from penstock.errors import PenstockError, StateInvalidError
from penstock.plan.plan import Traffic
from tests.harness import bits, leaves
from tests.runtime.modules import STAGING_CAP_BYTES, LruModel, hooks, traffic
from tests.runtime.soft import SoftHooks
from tests.soak.reference import FIRST_STATE, Reference, same

# On a GPU, beside the budget: kernels' code, workspaces of libraries, and what the driver keeps books with.
GPU_SLACK_BYTES = 96 << 20


class Wrong(Exception):
    """What a soak looks for."""


def require(condition: object, *said: object) -> None:
    if not condition:
        raise Wrong(" ".join(map(str, said)))


class Subject:
    def __init__(self, module: penstock.Module, reference: Reference, before_bytes: int | None) -> None:
        self.module = module
        self.reference = reference
        self.kind = reference.kind
        self.on_gpu = module.device.type == "cuda"
        self.state = FIRST_STATE
        self.most_bytes = module.budget_bytes
        # Of the GPU, before the module was loaded; and the most that was taken since, less the budget.
        self._before_bytes = before_bytes
        self._beyond_bytes = 0
        # Whose weights the ring holds; None: nobody knows.
        self._owner: str | None = ""
        self._lru: LruModel | None = None
        self.ring_is_new()
        self._calls: list[int] = []
        self._outputs: list[Any] = []
        stats = module.stats()
        self._runs, self._replays = stats.runs, stats.replays

    # ---- what the module should be like now

    def ring_is_new(self) -> None:
        """Another plan, or another pool."""
        self._owner = ""
        # A model of the pool of the soft driver; that of a GPU rounds otherwise.
        modelled = self.module.plan is None and not self.on_gpu
        self._lru = LruModel(self.module.program, self.module.budget_bytes) if modelled else None

    def ring_is_unknown(self) -> None:
        self._owner, self._lru = None, None

    @property
    def driver(self) -> SoftHooks:
        return hooks(self.module)

    def check_memory(self) -> None:
        """S4: as the module says, and as the driver has counted."""
        module = self.module
        self.most_bytes = max(self.most_bytes, module.budget_bytes)
        held_bytes, peak_bytes = module.device_memory()
        require(held_bytes <= module.budget_bytes, "held", held_bytes, "of a budget of", module.budget_bytes)
        require(peak_bytes <= self.most_bytes, "peak", peak_bytes, "with budgets up to", self.most_bytes)
        if module.plan is not None:
            require(held_bytes == module.plan.device_bytes, "held", held_bytes, "planned", module.plan.device_bytes)
        if self.on_gpu:
            self._check_gpu(held_bytes)
            return
        counts = self.driver.counts()
        if module.plan is None:
            require(counts.pool_bytes <= module.budget_bytes and not counts.block_bytes, "pool of", counts.pool_bytes)
        else:
            driver_bytes = counts.block_bytes, counts.peak_block_bytes, counts.pool_bytes
            require(
                driver_bytes == (held_bytes, peak_bytes, 0), "the driver gave", driver_bytes, held_bytes, peak_bytes
            )
        require(counts.peak_host_bytes <= STAGING_CAP_BYTES, "staging took", counts.peak_host_bytes)

    def _check_gpu(self, held_bytes: int) -> None:
        if self._before_bytes is not None:
            taken_bytes = gpu_bytes() - self._before_bytes
            self._beyond_bytes = max(self._beyond_bytes, taken_bytes - self.module.budget_bytes)

    def check_closed(self) -> None:
        """What the GPU lost beyond the budget is what libraries keep, for kernels and for each thread: that stays
        when the module has closed. What has gone with the module was its own."""
        if self._before_bytes is not None:
            kept_bytes = gpu_bytes() - self._before_bytes
            require(
                self._beyond_bytes <= max(kept_bytes, 0) + GPU_SLACK_BYTES,
                *("beyond the budget the GPU lost", self._beyond_bytes, "and libraries keep", kept_bytes),
            )

    # ---- running

    def run(self, calls: Sequence[int], run: Callable[..., Any] | None = None) -> list[Any]:
        """Back to back, without waiting for anything in between. What was begun is what `finish` looks at."""
        self._calls, self._outputs = list(calls), []
        for call in calls:
            method, arguments = self.kind.calls[call]
            self._outputs.append((run or self.module.run_method)(method, *arguments))
        return self._outputs

    def finish(self, *, cut_short: bool, replanned: bool = False) -> tuple[int, int]:
        """After run(): everything that it gave, and what was counted. Returns how many runs there were, and how many of
        them were replays.

        `cut_short`: an interrupt or an error ended it. Then the last run happened or did not, and says so.
        `replanned`: the plan is not the one that they ran by.
        """
        stats = self.module.stats()
        done, self._runs = stats.runs - self._runs, stats.runs
        replays, self._replays = stats.replays - self._replays, stats.replays
        given = len(self._outputs)
        require(done in ((given, given + 1) if cut_short else (given,)), "runs:", done, "outputs:", given)
        require(done <= len(self._calls), "more runs than calls")
        if replanned:
            self.ring_is_unknown()
        expected: Traffic | None = None
        for index, call in enumerate(self._calls[:done]):
            wanted, self.state = self.reference.after(self.state, call)
            if index < given:
                found = [bits(leaf) for leaf in leaves(self._outputs[index])]
                require(same(found, wanted), f"run {index} of {done} (call {call}) gave other bits")
            expected = self._expect(self.kind.calls[call][0])
        if expected is not None and not replanned and not cut_short:  # else the last run may be one that failed
            counted = traffic(self.module.last_run)
            require(counted == expected, "counted", counted, "where the plan says", expected)
        if cut_short or replanned:
            self.ring_is_unknown()
        self._calls, self._outputs = [], []
        return done, replays

    def joined(self, runs: int) -> None:
        """So many runs were made and compared elsewhere."""
        stats = self.module.stats()
        require(stats.runs - self._runs == runs, "runs:", stats.runs - self._runs, "made:", runs)
        self._runs = stats.runs
        self.ring_is_unknown()

    def _expect(self, method: str) -> Traffic | None:
        """What the next run of a method counts; None where that cannot be said."""
        if self.module.plan is None:
            return None if self._lru is None else self._lru.run(self.module.program.method(method).schedule)
        before, self._owner = self._owner, method
        planned = self.module.plan.method(method)
        return None if before is None else planned.warm if before == method else planned.cold

    # ---- state

    def read_all(self) -> list[Tensor]:
        return [self.module.read_state(name) for name in self.reference.state_names]

    def settle_state(self, *allowed: int, may_be_invalid: bool = False) -> None:
        """State is one of these; or, after something failed, unusable until it is reset, and says so."""
        if not self.reference.state_names:
            return
        try:
            found = self.reference.number_of(self.read_all())
        except StateInvalidError:
            require(may_be_invalid, "state is invalid although nothing failed")
            method, arguments = self.kind.calls[0]
            try:
                self.module.run_method(method, *arguments)
            except StateInvalidError:
                self.module.reset_state()
                found, allowed = self.reference.number_of(self.read_all()), (FIRST_STATE,)
            else:
                raise Wrong("a run began although state is invalid") from None
        require(found in allowed, "state is number", found, "where it may be", allowed)
        self.state = found

    def write(self, number: int) -> None:
        for name, value in zip(self.reference.state_names, self.reference.values_of(number), strict=True):
            self.module.write_state(name, value)


def gpu_bytes() -> int:
    """Of device memory in use, without what torch's allocator holds for everything that is no weight."""
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()


def is_asked_for(error: Exception) -> bool:
    return isinstance(error, PenstockError) and "a test asked for this failure" in str(error)


def copied(path: Path, folder: Path) -> Path:
    """Files of a session's own, to be changed."""
    for suffix in (".pt2", ".ptd"):
        (folder / f"model{suffix}").write_bytes(path.with_suffix(suffix).read_bytes())
    return folder / "model.pt2"
