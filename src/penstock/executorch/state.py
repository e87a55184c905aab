"""State of a .pte: what its delegates hold on their device, and what lies in ExecuTorch's memory because they cannot.

One of each name, whatever the methods.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import InputError, StateInvalidError
from penstock.executorch.native import NativeModule
from penstock.executorch.sessions import Sessions
from penstock.runtime.state_rows import check_rows, select_rows


class ProgramState:
    """Made when all methods are loaded, and none has run."""

    def __init__(self, native: NativeModule, sessions: Sessions, methods: Sequence[str]) -> None:
        self._memory = StateMemory(native, methods)
        # All sessions have the same, and a run has ended when its outputs are there, in main memory.
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
        self._memory.require_valid(method)
        if method in self._users:
            self._delegates.state_store.require_valid()

    def mark_invalid(self, method: str, error: BaseException) -> None:
        """After a failed run: state may be half written. Only reset() makes it usable again."""
        reason = f"method {method!r} failed: {error}"
        self._memory.mark_invalid(method, reason)
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


class StateMemory:
    """Views of ExecuTorch's memory, for as long as the methods are loaded. All of them must be, and none have run."""

    def __init__(self, native: NativeModule, methods: Sequence[str]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._users: dict[str, list[str]] = {method: native.state_names(method) for method in methods}
        for method, names in self._users.items():
            for name in names:
                self._tensors.setdefault(name, native.state(method, name))
        # What is not here starts as zeros.
        self._first = {name: tensor.clone() for name, tensor in self._tensors.items() if tensor.any()}
        self._invalid: str | None = None

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def require_valid(self, method: str) -> None:
        """A method without state is none the worse for what another one left behind."""
        if self._users[method]:
            self._require_valid()

    def mark_invalid(self, method: str, reason: str) -> None:
        if self._users[method]:
            self._invalid = reason

    def read(self, name: str) -> torch.Tensor:
        """A copy of the present value."""
        tensor = self._tensors[name]
        self._require_valid()
        return tensor.clone()

    def write(self, name: str, value: torch.Tensor) -> None:
        tensor = self._tensors[name]
        self._require_valid()
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            given = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
            raise InputError(f"state {name!r} was given {given}, needs {tensor.dtype}{list(tensor.shape)}")
        with torch.no_grad():
            tensor.copy_(value)

    def check_rows(self, rows: torch.Tensor) -> None:
        self._require_valid()
        check_rows(self._tensors, rows, dict.fromkeys(self._tensors, 0))

    def select_rows(self, rows: torch.Tensor) -> None:
        select_rows(self._tensors, rows, dict.fromkeys(self._tensors, 0))

    def reset(self) -> None:
        """Puts the first values back."""
        for name, tensor in self._tensors.items():
            with torch.no_grad():
                tensor.copy_(self._first[name]) if name in self._first else tensor.zero_()
        self._invalid = None

    def _require_valid(self) -> None:
        if self._invalid is not None:
            raise StateInvalidError(
                f"the state ({', '.join(self._tensors)}) may be half written: {self._invalid}; call reset_state() first"
            )
