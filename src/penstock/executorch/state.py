"""State: the mutable buffers of a .pte, which lie in ExecuTorch's memory, one for each name whatever the methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import InputError, StateInvalidError
from penstock.executorch.native import NativeModule
from penstock.runtime.state_rows import check_rows, select_rows


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
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def require_valid(self, method: str) -> None:
        """A method without state is none the worse for what another one left behind."""
        if self._users[method]:
            self._require_valid()

    def mark_invalid(self, method: str, error: BaseException) -> None:
        """After a failed run: state may be half written. Only reset() makes it usable again."""
        if self._users[method]:
            self._invalid = f"method {method!r} failed: {error}"

    def read(self, name: str) -> torch.Tensor:
        """A copy of the present value."""
        tensor = self._tensor(name)
        self._require_valid()
        return tensor.clone()

    def write(self, name: str, value: torch.Tensor) -> None:
        tensor = self._tensor(name)
        self._require_valid()
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            given = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
            raise InputError(f"state {name!r} was given {given}, needs {tensor.dtype}{list(tensor.shape)}")
        with torch.no_grad():
            tensor.copy_(value)

    def select_rows(self, rows: torch.Tensor) -> None:
        self._require_valid()
        dims = dict.fromkeys(self._tensors, 0)
        check_rows(self._tensors, rows, dims)
        select_rows(self._tensors, rows, dims)

    def reset(self) -> None:
        """Puts the first values back."""
        for name, tensor in self._tensors.items():
            with torch.no_grad():
                tensor.copy_(self._first[name]) if name in self._first else tensor.zero_()
        self._invalid = None

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            known = ", ".join(self._tensors) or "none that it names (emit_mutable_buffer_names=True of ExecuTorch)"
            raise InputError(f"there is no state {name!r}; the program has {known}")
        return self._tensors[name]

    def _require_valid(self) -> None:
        if self._invalid is not None:
            raise StateInvalidError(
                f"the state ({', '.join(self._tensors)}) may be half written: {self._invalid}; call reset_state() first"
            )
