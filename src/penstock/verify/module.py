"""A compiled model, run under poison: the slowest and most distrustful way, for tests and for verifying files.

Weights come from the .ptd, states are held as a module would hold them, and every run is checked by a PoisonSession.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch

import penstock.kv.ops  # noqa: F401 - programs call these ops by their names
from penstock.errors import IdentityError, PackageError, WeightsFileError
from penstock.native import core
from penstock.program import ConstantSpec, Method, read_program
from penstock.regular_file import open_regular
from penstock.torch_private.loader import CompiledMethod
from penstock.torch_private.pytree import flatten, unflatten
from penstock.verify.poison import PoisonSession
from penstock.weight import State
from penstock.weights import read_index
from penstock.weights.packing import raw_content


class PoisonedModule:
    """Runs the methods of `program_path` with the weights of the .ptd beside it (or of `weights_path`)."""

    def __init__(self, program_path: str | Path, weights_path: str | Path | None = None) -> None:
        self.path = Path(program_path)
        self.program = read_program(self.path)
        self._index = read_index(weights_path or self.path.with_suffix(".ptd"))
        if self._index.identity != self.program.identity:
            raise IdentityError(
                f"{self._index.path} has identity {self._index.identity}, {self.path} needs {self.program.identity}"
            )
        with open_regular(self._index.path, WeightsFileError) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants writable memory; nothing writes
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._weights = {weight.name: self._stored(weight.name) for weight in self.program.weights}
        self.states = {state.name: self._state(state) for state in self.program.states}
        core()
        self._methods: dict[str, CompiledMethod] = {}
        self.sessions: dict[str, PoisonSession] = {}

    def _stored(self, name: str) -> torch.Tensor:
        entry = self._index[name]
        if entry.packing is not None:
            return torch.frombuffer(raw_content(self._index, entry), dtype=torch.uint8)
        return self._bytes[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]

    def _state(self, state: State) -> torch.Tensor:
        """A fresh buffer with the state's first value, laid out as the program expects it."""
        dtype = getattr(torch, state.dtype)
        stored_shape = [state.shape[d] for d in state.dim_order]
        buffer = torch.zeros(stored_shape, dtype=dtype)
        if state.name in self._index:
            source = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
            source.copy_(self._stored(state.name))
        inverse = [state.dim_order.index(d) for d in range(len(state.shape))]
        return buffer.to(self.program.device).permute(inverse)

    def compiled(self, name: str) -> CompiledMethod:
        if name not in self._methods:
            self._methods[name] = CompiledMethod(self.path, name)
        return self._methods[name]

    def run_method(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        method = self.program.method(name)
        compiled = self.compiled(name)
        if name not in self.sessions:
            on_cuda = self.program.device == "cuda"
            self.sessions[name] = PoisonSession(method.schedule, self._weights, on_cuda=on_cuda)
        inputs = [self.states[state] for state in method.states] + _tensors(method, arguments, keywords)
        outputs = iter(self.sessions[name].run(lambda: compiled(inputs)))
        leaves = [spec.value if isinstance(spec, ConstantSpec) else next(outputs) for spec in method.signature.outputs]
        return unflatten(leaves, method.signature.out_spec)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.run_method(self.program.methods[0].name, *arguments, **keywords)


def _tensors(method: Method, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[torch.Tensor]:
    leaves, spec = flatten(arguments, keywords)
    if spec != method.signature.in_spec:
        raise PackageError(
            f"method {method.name!r} was called with {spec}, it was exported for {method.signature.in_spec}"
        )
    tensors: list[torch.Tensor] = []
    for leaf, expected in zip(leaves, method.signature.inputs, strict=True):
        if isinstance(expected, ConstantSpec):
            if leaf != expected.value:
                raise PackageError(f"input {expected.name!r} is {leaf!r}; it was fixed to {expected.value!r} at export")
        else:
            tensors.append(leaf)
    return tensors
