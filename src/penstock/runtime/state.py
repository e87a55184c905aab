"""State: one allocation per mutated buffer, shared by all methods, from load to close.

With a GPU, the host side of a KV cache is registered host memory: compiled code gets it as a tensor of the GPU at its
mapped address, and everything else here uses it in place. A cache whose split was chosen at load is read and written as
one state (runtime.split_state).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from penstock.budget import format_bytes
from penstock.errors import DeviceMemoryError, HostMemoryError, InputError, RegistrationError, StateInvalidError

# Importing any of penstock.kv registers its ops, which compiled code calls by name.
from penstock.kv.host_block import host_tensor
from penstock.kv.mapped_tensor import mapped_tensor
from penstock.program import Method
from penstock.runtime.split_state import SplitState, joined, spread
from penstock.runtime.state_rows import check_rows, select_rows
from penstock.weight import SEQUENCES_DIM, State


class States:
    """Tensors that persist between runs, by name. State that may be half written is unusable until it is reset."""

    def __init__(self, tensors: dict[str, torch.Tensor], row_dims: dict[str, int] | None = None) -> None:
        """`row_dims`: the dimension of each tensor that its rows lie along; by default the first."""
        self._tensors = tensors
        self._row_dims = row_dims or dict.fromkeys(tensors, 0)
        self._invalid: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def mark_invalid(self, reason: str) -> None:
        """For the time of a run, and after one that failed: then only reset() makes the state usable again."""
        self._invalid = reason

    def mark_valid(self) -> None:
        """Called when the run that made the state unusable has ended well."""
        self._invalid = None

    def require_valid(self) -> None:
        if self._invalid is not None:
            raise StateInvalidError(
                f"the state ({', '.join(self.names)}) may be half written: {self._invalid}; call reset_state() first"
            )

    def read(self, name: str) -> torch.Tensor:
        """A copy of the present value, in host memory if that is where the state lies. Runs must have ended."""
        self.require_valid()
        return self._tensors[name].clone()

    def write(self, name: str, value: torch.Tensor) -> None:
        self.require_valid()
        _check_value(name, *self._shape_and_dtype(name), value)
        self._invalid = f"write_state({name!r}) did not finish"
        with torch.no_grad():
            self._put(name, value)
        self._invalid = None

    def _shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        return tuple(self._tensors[name].shape), str(self._tensors[name].dtype).removeprefix("torch.")

    def _put(self, name: str, value: torch.Tensor) -> None:
        self._tensors[name].copy_(value)

    def check_rows(self, rows: torch.Tensor) -> None:
        self.require_valid()
        check_rows(self._tensors, rows, self._row_dims)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.check_rows(rows)
        self._invalid = "select_state_rows() did not finish"
        select_rows(self._tensors, rows, self._row_dims)
        self._invalid = None


class StateStore(States):
    """`stored` holds the names whose first values lie in the weights file (its index will do), and `read_stored` gives
    their bytes. The weights file has the last word: a state that would start as zeros starts with its stored value.
    """

    def __init__(
        self,
        states: Sequence[State],
        device: torch.device,
        stored: Container[str],
        read_stored: Callable[[str], torch.Tensor | bytes],
        split: Sequence[SplitState] = (),
    ) -> None:
        self._split = {cache.near.name: cache for cache in split}
        self._exported = {state.name: state for state in states}
        sides = {side.name: side for cache in split for side in cache.sides}
        states = [sides.get(state.name, state) for state in states]
        self._states = {state.name: state for state in states}
        self._device = device
        self._stored = stored
        self._read_stored = read_stored
        # Leave inference mode even if the caller is in it: a tensor made inside it could not be written outside.
        with torch.inference_mode(False):
            self._buffers = {state.name: self._allocated(state) for state in states}
            tensors = {state.name: _permuted(self._buffers[state.name], state) for state in states}
            # What compiled code takes: the same memory at the device's address.
            self._inputs = {
                state.name: _permuted(mapped_tensor(self._buffers[state.name], device), state)
                if self._is_far(state)
                else tensors[state.name]
                for state in states
            }
        # A cache's first dimension is keys and values; its second is the sequences.
        super().__init__(tensors, {name: SEQUENCES_DIM if name in sides else 0 for name in tensors})
        # What can be read and written.
        self._shown = {name: state for name, state in self._states.items() if state.near not in self._split}
        self._shown.update((name, cache.whole) for name, cache in self._split.items())
        self.reset()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shown)

    @property
    def device_bytes(self) -> int:
        """Bytes of state on the device: all but host sides, which are host memory, or on the CPU stand for it."""
        return sum(self._buffers[name].nbytes for name, state in self._states.items() if not state.host)

    def tensors(self, method: Method) -> list[torch.Tensor]:
        """The states that are the method's leading inputs; the compiled code writes into them."""
        # A method without state can run, whatever another one left behind.
        if method.states:
            self.require_valid()
        return [self._inputs[name] for name in method.states]

    def input(self, name: str) -> torch.Tensor:
        """What compiled code takes for a state, whether or not the state is valid."""
        return self._inputs[name]

    def read(self, name: str) -> torch.Tensor:
        self._require_known(name)
        if name not in self._split:
            return super().read(name)
        self.require_valid()
        return joined(*self._sides(name))

    def write(self, name: str, value: torch.Tensor) -> None:
        self._require_known(name)
        super().write(name, value)

    def _shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        return self._shown[name].shape, self._shown[name].dtype

    def _put(self, name: str, value: torch.Tensor) -> None:
        if name in self._split:
            spread(value, *self._sides(name))
        else:
            super()._put(name, value)

    def reset(self) -> None:
        """Puts the first values back."""
        self._invalid = "reset_state() did not finish"
        for name, buffer in self._buffers.items():
            cache = next((cache for cache in self._split.values() if name in (cache.near.name, cache.far.name)), None)
            if cache is None or not any(side.name in self._stored for side in cache.sides):
                self._fill(name, buffer)
            elif name == cache.near.name:
                self._fill_split(cache)
        self._invalid = None

    def _fill_split(self, cache: SplitState) -> None:
        """Fills a cache from stored values, which are split as at export."""
        exported = [self._exported[side.name] for side in cache.sides]
        values = [torch.empty(state.shape, dtype=getattr(torch, state.dtype)) for state in exported]
        for state, value in zip(exported, values, strict=True):
            self._fill(state.name, value)
        spread(joined(*values), *self._sides(cache.near.name))

    def _sides(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self._split[name]
        return self._tensors[cache.near.name], self._tensors[cache.far.name]

    def _require_known(self, name: str) -> None:
        if name not in self._shown:
            near = self._states[name].near if name in self._states else None
            hint = "" if near is None else f"; it is the host's part of {near!r}"
            raise InputError(f"there is no state {name!r}; the program has {', '.join(self._shown) or 'none'}{hint}")

    def _is_far(self, state: State) -> bool:
        return state.host and self._device.type == "cuda"

    def _allocated(self, state: State) -> torch.Tensor:
        shape, dtype = [state.shape[d] for d in state.dim_order], getattr(torch, state.dtype)
        if self._is_far(state):
            return self._registered(state, shape, dtype)
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA is one
            raise DeviceMemoryError(
                f"state {state.name!r} needs {format_bytes(state.nbytes)} on {self._device}, which refused it: {error}"
            ) from error

    def _registered(self, state: State, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return host_tensor(shape, dtype, self._device)
        except (OSError, OverflowError, RegistrationError) as error:
            raise HostMemoryError(
                f"state {state.name!r} needs {format_bytes(state.nbytes)} of host memory that {self._device} can read, "
                f"and there is none: {error}"
            ) from error

    def _fill(self, name: str, buffer: torch.Tensor) -> None:
        # As bytes: not every dtype can be filled or copied, but every dtype can be viewed as bytes.
        target = buffer.reshape(-1).view(torch.uint8)
        if name not in self._stored:
            target.zero_()
            return
        found = self._read_stored(name)
        source = found if isinstance(found, torch.Tensor) else _viewed(found)
        if source.nbytes != target.nbytes:
            raise InputError(f"state {name!r} has {source.nbytes} stored bytes, needs {target.nbytes}")
        target.copy_(source.reshape(-1).view(torch.uint8))


def _permuted(buffer: torch.Tensor, state: State) -> torch.Tensor:
    return buffer.permute([state.dim_order.index(d) for d in range(len(state.dim_order))])


def _viewed(content: bytes) -> torch.Tensor:
    # A bytearray, because torch warns about read-only memory. torch does not take an empty one at all.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _check_value(name: str, shape: tuple[int, ...], dtype: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"state {name!r} was given {value!r:.80} of type {type(value).__name__}, needs a tensor")
    if value.is_nested or value.layout is not torch.strided or value.device.type == "meta":
        raise InputError(f"state {name!r} was given a {value.layout} tensor on {value.device}, needs a dense one")
    given = str(value.dtype).removeprefix("torch.")
    if tuple(value.shape) != shape or given != dtype:
        raise InputError(
            f"state {name!r} was given {given}{list(value.shape)} ({format_bytes(value.nbytes)}), needs "
            f"{dtype}{list(shape)} ({format_bytes(math.prod(shape) * value.dtype.itemsize)})"
        )
