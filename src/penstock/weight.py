"""A weight: a tensor the program only reads. And a state: a buffer it mutates. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bytes per element, by torch's own dtype names. Sub-byte dtypes are not here: they have no whole-byte elements.
ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


# The dimensions of a KV cache: keys and values, sequences, heads, positions, numbers of a head.
CACHE_DIMS = 5
SEQUENCES_DIM = 1
POSITIONS_DIM = 3


# Limits for experts, which are the rows of a weight: as in csrc/experts/expert_table.h.
MOST_EXPERTS = 4096
EXPERT_UNIT_BYTES = 16


@dataclass(frozen=True)
class Weight:
    """One set of bytes. `aliases` are the further names of a tied weight.

    The bytes are those of the tensor permuted by `dim_order` and made contiguous: a channels-last weight keeps its
    layout without any stride being stored.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else 0

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of the bytes as they lie in the file and in memory."""
        return tuple(self.shape[d] for d in self.dim_order)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def are_experts(weight: Weight) -> bool:
    """Whether its rows can be experts: they lie one after the other, are not too many, and kernels can copy them."""
    return (
        len(weight.shape) > 1
        and weight.dim_order == tuple(range(len(weight.shape)))
        and weight.shape[0] <= MOST_EXPERTS
        and weight.row_bytes > 0
        and weight.row_bytes % EXPERT_UNIT_BYTES == 0
    )


@dataclass(frozen=True)
class State:
    """A mutated buffer: an input that the program writes. Never a weight, never inside the budget."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    # "zeros", or "stored": the first value lies in the weights file under the state's name. If a weights file holds a
    # value for a state that the program starts as zeros, the file has the last word.
    init: str
    # The host side of a KV cache: with a GPU it lies in host memory, which kernels read and write in place.
    host: bool = False
    # For a host side that only our ops take, and as it is: the state with the positions before its own. The loader then
    # chooses how many of all these positions lie on the device; the shapes are those of the export.
    near: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
