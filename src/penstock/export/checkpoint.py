"""Values that do not come from the program: from safetensors files, or given as tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.export.safetensors_file import StoredTensor, read_checkpoint, stored_pieces
from penstock.export.values import equal_pieces, has_value, tensor_pieces
from penstock.weight import State, Weight


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that is made when its bytes are wanted, and held no longer than that."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


Source = StoredTensor | MadeTensor | torch.Tensor


class Checkpoint:
    """Named tensors from safetensors files and from tensors given directly; later sources win."""

    def __init__(self, sources: Any) -> None:
        self._tensors: dict[str, Source] = {}
        # Name -> number of the source that it comes from.
        self._source_of: dict[str, int] = {}
        listed = sources if isinstance(sources, (list, tuple)) else [sources]
        if not listed:
            raise CheckpointError("weights: the list of sources is empty")
        for number, source in enumerate(listed):
            found = _source_tensors(source)
            self._tensors.update(found)
            self._source_of.update(dict.fromkeys(found, number))
        self.description = ", ".join(str(s) if not isinstance(s, Mapping) else "given tensors" for s in listed)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def find(self, names: Sequence[str]) -> str | None:
        """The name under which the latest source has a tied weight; the first one if it has several."""
        present = [name for name in names if name in self]
        return max(present, key=self._source_of.__getitem__, default=None)

    def rivals(self, found: str, names: Sequence[str]) -> list[str]:
        """Other names of a tied weight under which the same source holds something else."""
        order = range(len(self.layout(found)[1]))
        return [
            name
            for name in names
            if name != found
            and self._source_of.get(name) == self._source_of[found]
            and not (
                self.layout(name) == self.layout(found)
                and equal_pieces(self.pieces(name, order), self.pieces(found, order))
            )
        ]

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        tensor = self._tensors[name]
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)

    def pieces(self, name: str, dim_order: Sequence[int]) -> Iterator[memoryview]:
        tensor = self._tensors[name]
        if isinstance(tensor, MadeTensor):
            tensor = tensor.make()
        if isinstance(tensor, torch.Tensor):
            return tensor_pieces(tensor, dim_order)
        return stored_pieces(tensor, dim_order)


def _source_tensors(source: Any) -> Mapping[str, Source]:
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            _check_given(name, tensor)
        return source
    if isinstance(source, (str, os.PathLike)):
        return read_checkpoint(Path(source))
    raise CheckpointError(
        f"weights: expected a safetensors file, a folder of them, a mapping of tensors, or a list of those; "
        f"got {type(source).__name__}"
    )


def _check_given(name: Any, tensor: Any) -> None:
    if isinstance(tensor, StoredTensor | MadeTensor):
        return
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"weights: {name!r} must be a tensor with values, got {type(tensor).__name__}")
    if not has_value(tensor):
        raise CheckpointError(f"weights: {name!r} must be a tensor with values, got one on meta")
    # The shape and dtype of a subclass or of another layout do not describe its bytes.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CheckpointError(f"weights: {name!r} must be a plain tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise CheckpointError(f"weights: {name!r} must be a strided tensor, got {tensor.layout}")


def mismatches(wanted: Sequence[Weight | State], optional: frozenset[str], checkpoint: Checkpoint) -> list[str]:
    """Every way in which the checkpoint does not fit, all at once."""
    problems: list[str] = []
    for item in wanted:
        names = item.names if isinstance(item, Weight) else (item.name,)
        found = checkpoint.find(names)
        if found is None:
            if item.name not in optional:
                problems.append(f"{' / '.join(names)}: missing")
            continue
        dtype, shape = checkpoint.layout(found)
        if shape != item.shape:
            problems.append(f"{found}: has shape {list(shape)}, needs {list(item.shape)}")
        if dtype != item.dtype:
            problems.append(f"{found}: has dtype {dtype}, needs {item.dtype}")
        if (dtype, shape) == (item.dtype, item.shape):
            rivals = checkpoint.rivals(found, names)
            problems.extend(f"{name}: differs from {found}, to which the program ties it" for name in rivals)
    return problems
