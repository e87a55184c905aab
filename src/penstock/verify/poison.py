"""Runs a compiled method with every weight in a fresh buffer that is poisoned as soon as its last reader has run.

A method that passes makes exactly the recorded accesses in the recorded order, reads no weight after its recorded last
reader, writes into none, and returns none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch

from penstock.errors import PenstockError, ScheduleError, WeightEscapesError
from penstock.native import core
from penstock.schedule import Schedule


class PoisonSession:
    """`weights` maps names to the bytes of each weight in storage order, on the host."""

    def __init__(self, schedule: Schedule, weights: Mapping[str, torch.Tensor], *, on_cuda: bool = False) -> None:
        accesses = schedule.accesses
        # Kept: the core reads these bytes during runs.
        self._sources = [weights[access.weight].reshape(-1).contiguous() for access in accesses]
        if any(source.device.type != "cpu" for source in self._sources):
            raise PenstockError("the bytes handed to a poison session must lie on the host")
        count = len(accesses)
        numbers = (ctypes.c_int64 * count)(*(access.number for access in accesses))
        last = (ctypes.c_int64 * count)(*(schedule.last_step[access.number] for access in accesses))
        pointers = (ctypes.c_void_p * count)(*(source.data_ptr() for source in self._sources))
        sizes = (ctypes.c_int64 * count)(*(source.numel() * source.element_size() for source in self._sources))
        self._core = core()
        self._session = self._core.penstock_poison_create(
            count, numbers, last, pointers, sizes, len(schedule.steps), int(on_cuda)
        )
        if not self._session:
            raise PenstockError(self._core.penstock_create_error().decode())

    def run(self, function: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Call `function`, which runs the compiled method once, inside the session."""
        self._core.penstock_poison_begin(self._session)
        failure: Exception | None = None
        outputs: list[torch.Tensor] = []
        whole = False
        try:
            outputs = list(function())
        except RuntimeError as error:  # generated code reduces our failure to a generic one: ours is looked up below
            failure = error
        finally:  # whatever was raised: the session is not the thread's any more
            kept = self._core.penstock_poison_error(self._session).decode()
            whole = self._core.penstock_poison_end(self._session) == 0
        if failure is not None and not kept:
            raise failure
        if not whole:
            raise ScheduleError(self._core.penstock_poison_error(self._session).decode()) from failure
        for index, output in enumerate(outputs):
            if output.numel() and self._core.penstock_poison_owns(self._session, output.data_ptr()):
                raise WeightEscapesError(f"output {index} lies in the memory of a lent weight")
        return outputs

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were lent at once in the last run."""
        return int(self._core.penstock_poison_peak_bytes(self._session))

    def close(self) -> None:
        if self._session:
            self._core.penstock_poison_destroy(self._session)
            self._session = None

    def __enter__(self) -> PoisonSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
