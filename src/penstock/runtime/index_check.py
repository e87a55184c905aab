"""Checks the numbers with which a program indexes its tables and caches, before any of it runs."""

from __future__ import annotations

import torch

from penstock.errors import InputError
from penstock.program import IndexRange, TensorSpec

# torch.aminmax takes these dtypes as they are.
_ORDERED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_indices(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Waits for the device that the tensor lies on."""
    for index in spec.indexes:
        numbers = _part(tensor, index)
        if not numbers.numel():
            continue
        least, greatest = _extremes(numbers)
        if least < index.low or greatest >= index.high:
            raise InputError(_message(spec.name, tensor, index))


def _part(tensor: torch.Tensor, index: IndexRange) -> torch.Tensor:
    return tensor[tuple([slice(*part) for part in index.region])] if index.region else tensor


def _extremes(numbers: torch.Tensor) -> tuple[int, int]:
    if numbers.numel() == 1:
        only = int(numbers.item())
        return only, only
    if numbers.dtype not in _ORDERED:
        numbers = numbers.to(torch.int64)
    least, greatest = torch.aminmax(numbers)
    return int(least.item()), int(greatest.item())


def _message(name: str, tensor: torch.Tensor, index: IndexRange) -> str:
    every = torch.arange(tensor.numel()).reshape(tensor.shape)
    places = _part(every, index).flatten()
    numbers = _part(tensor.cpu().to(torch.int64), index).flatten()
    first = int(((numbers < index.low) | (numbers >= index.high)).nonzero()[0])
    place = [int(part) for part in torch.unravel_index(places[first], tensor.shape)]
    entries = (
        f"{index.table!r}, which has {index.size} rows"
        if index.dim == 0
        else f"dimension {index.dim} of {index.table!r}, which has {index.size} entries"
    )
    at = f" at {place}" if place else ""
    return (
        f"input {name!r} is {int(numbers[first])}{at}; needs to be at least {index.low} and below {index.high}: it "
        f"indexes {entries}"
    )
