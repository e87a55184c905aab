"""The delegates of a .pte as methods of a .pt2, which the code inside the file is: planned and set up as such.

ExecuTorch calls the delegates; what they run in is made here, by the same code as for penstock.Module over a .pt2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.program import Method, Program
from penstock.runtime.module import Module
from penstock.runtime.operation_lock import OperationLock
from penstock.runtime.state import StateStore
from penstock.runtime.weights_source import read_weights_index
from penstock.temporary import TemporaryFolder
from penstock.weights import WeightsIndex

T = TypeVar("T")


class Delegates(Module):
    """Some or all delegates of one program, in one session. Not called itself: run_method is ExecuTorch's business."""

    _is_delegate = True

    def __init__(
        self,
        shown: Path,
        code: bytes,
        names: Sequence[str],
        tied: Iterable[Sequence[str]],
        lock: OperationLock,
        budget: int | str | None,
        *,
        weights: Path,
        transfer_bytes: int,
        state_store: StateStore | None = None,
        **options: Any,
    ) -> None:
        self._shown = shown
        self._transfer_bytes = transfer_bytes
        # Of the other delegates of the program, where there are any.
        self._shared_state = state_store
        self._names = tuple(names)
        index = read_weights_index(weights)
        self._identity = index.identity
        # A file that ExecuTorch wrote has one of the names of a tied weight, any.
        self._stored_as = {
            known[0]: next((name for name in known if name in index), known[0]) for known in tied if len(known) > 1
        }
        with TemporaryFolder("executorch") as folder:
            package = folder / "delegates.pt2"
            package.write_bytes(code)
            super().__init__(package, budget, weights=weights, **options)
        self.path = shown
        # One for all delegates of a loaded program, held while one of its methods runs.
        self._lock = lock

    @property
    def program(self) -> Program:
        """The delegates as methods, with the weights that they read."""
        return self._program

    @program.setter
    def program(self, whole: Program) -> None:
        methods = tuple(self._renamed(method) for method in whole.methods if method.name in self._names)
        read = {access.weight for method in methods for access in method.schedule.accesses}
        weights = (replace(weight, name=self._stored_as.get(weight.name, weight.name)) for weight in whole.weights)
        self._program = replace(
            whole,
            methods=methods,
            weights=tuple(weight for weight in weights if weight.name in read),
            # Delegates may be a part of what a weights file was written for: that every weight fits is all there is.
            identity=self._identity or whole.identity,
        )

    def _renamed(self, method: Method) -> Method:
        accesses = tuple(
            replace(access, weight=self._stored_as.get(access.weight, access.weight))
            for access in method.schedule.accesses
        )
        return replace(method, schedule=replace(method.schedule, accesses=accesses))

    def _say(self, lines: list[str]) -> None:
        if self.path == self._shown:  # else it is being loaded, and says so as a part of its program
            super()._say(lines)

    def _made_state(self, index: WeightsIndex) -> StateStore:
        return super()._made_state(index) if self._shared_state is None else self._shared_state

    @property
    def state_store(self) -> StateStore:
        return self._state

    def access_state(self, access: Callable[[StateStore], T]) -> T:
        """Inside an operation: the module's."""
        return self._synchronized(lambda: access(self._state))

    @property
    def session_handle(self) -> int:
        return self._session.handle
