"""The delegates of a .pte as methods of the .pt2 inside it: planned and set up as for any .pt2.

ExecuTorch calls the delegates. The sessions they run in are made here, with the code of penstock.Module for a .pt2.
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
    """Some or all delegates of one program, in one session. ExecuTorch calls them, not run_method."""

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
        # State of the program's other delegates, if there are any.
        self._shared_state = state_store
        self._names = tuple(names)
        index = read_weights_index(weights)
        self._identity = index.identity
        # A file that ExecuTorch wrote has just one of the names of a tied weight, and it can be any.
        self._stored_as = {
            known[0]: next((name for name in known if name in index), known[0]) for known in tied if len(known) > 1
        }
        with TemporaryFolder("executorch") as folder:
            package = folder / "delegates.pt2"
            package.write_bytes(code)
            super().__init__(package, budget, weights=weights, **options)
        self.path = shown
        # One lock for all delegates of a loaded program, held while one of its methods runs.
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
            # A weights file may serve more than these delegates, so the only requirement is that every weight fits.
            identity=self._identity or whole.identity,
        )

    def _renamed(self, method: Method) -> Method:
        accesses = tuple(
            replace(access, weight=self._stored_as.get(access.weight, access.weight))
            for access in method.schedule.accesses
        )
        return replace(method, schedule=replace(method.schedule, accesses=accesses))

    def _say(self, lines: list[str]) -> None:
        if self.path == self._shown:  # else its program is being loaded, and says it
            super()._say(lines)

    def _made_state(self, index: WeightsIndex) -> StateStore:
        return super()._made_state(index) if self._shared_state is None else self._shared_state

    @property
    def state_store(self) -> StateStore:
        return self._state

    def access_state(self, access: Callable[[StateStore], T]) -> T:
        """Call it inside an operation of the module."""
        return self._synchronized(lambda: access(self._state))

    @property
    def session_handle(self) -> int:
        return self._session.handle
