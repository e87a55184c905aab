"""State of a .pte: what its delegates hold on their device, and in ExecuTorch's memory what they cannot hold.

There is one state of each name for all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.errors import InputError
from penstock.executorch.native import NativeModule
from penstock.executorch.sessions import Sessions
from penstock.runtime.state import States


class ProgramState:
    """Made when all methods are loaded, and none has run."""

    def __init__(self, native: NativeModule, sessions: Sessions, methods: Sequence[str]) -> None:
        # Method -> its states in ExecuTorch's memory. A method without state is unaffected by what another left behind.
        self._memory_users = {method: names for method in methods if (names := native.state_names(method))}
        self._memory = StateMemory(native, self._memory_users)
        # All sessions share the same state, and a run has ended when its outputs are in main memory.
        self._delegates = sessions.all[0]
        self._names = sessions.payload.states
        self._users = {method for method in methods if sessions.payload.states_of(method)}

    @property
    def nbytes(self) -> int:
        return self._delegates.state_bytes + self._memory.nbytes

    @property
    def device_bytes(self) -> int:
        return self._delegates.device_state_bytes + (self._memory.nbytes if self._delegates.device.type == "cpu" else 0)

    def require_valid(self, method: str) -> None:
        if method in self._memory_users:
            self._memory.require_valid()
        if method in self._users:
            self._delegates.state_store.require_valid()

    def mark_invalid(self, method: str, error: BaseException) -> None:
        """After a failed run: state may be half written. Only reset() makes it usable again."""
        reason = f"method {method!r} failed: {error}"
        if method in self._memory_users:
            self._memory.mark_invalid(reason)
        if method in self._users:
            self._delegates.state_store.mark_invalid(reason)

    def read(self, name: str) -> torch.Tensor:
        if self._is_in_memory(name):
            return self._memory.read(name)
        return self._delegates.access_state(lambda store: store.read(name))

    def write(self, name: str, value: torch.Tensor) -> None:
        if self._is_in_memory(name):
            self._memory.write(name, value)
        else:
            self._delegates.access_state(lambda store: store.write(name, value))

    def select_rows(self, rows: torch.Tensor) -> None:
        self._memory.check_rows(rows)
        if self._names:
            self._delegates.access_state(lambda store: store.select_rows(rows))
        self._memory.select_rows(rows)

    def reset(self) -> None:
        self._memory.reset()
        if self._names:
            self._delegates.access_state(lambda store: store.reset())

    def _is_in_memory(self, name: str) -> bool:
        known = [*self._names, *self._memory.names]
        if name not in known:
            named = ", ".join(known) or "none that it names (emit_mutable_buffer_names=True of ExecuTorch)"
            raise InputError(f"there is no state {name!r}; the program has {named}")
        return name not in self._names


class StateMemory(States):
    """Views of ExecuTorch's memory, valid while the methods are loaded. Made when all are loaded and none has run."""

    def __init__(self, native: NativeModule, users: Mapping[str, Sequence[str]]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for method, names in users.items():
            for name in names:
                tensors.setdefault(name, native.state(method, name))
        super().__init__(tensors)
        # States that are not here start as zeros.
        self._first = {name: tensor.clone() for name, tensor in self._tensors.items() if tensor.any()}

    def reset(self) -> None:
        """Puts the first values back."""
        for name, tensor in self._tensors.items():
            with torch.no_grad():
                tensor.copy_(self._first[name]) if name in self._first else tensor.zero_()
        self._invalid = None
