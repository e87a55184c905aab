"""The codes that bench.packed_codes compares: the two kinds of bf16 that the core packs and decodes.

`seven` has three bits for a block's seven most frequent exponents, which is what earlier files have, and `three` is the
code of three levels, which is what `penstock pack` writes. docs/format.md has both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from bench.decoding import BLOCK_BYTES, MOST_BLOCKS, TILE_VALUES, Decoder, Params
from penstock.native import core

# By name: PackedKind of csrc/packed/packed_block.h.
KINDS = {"seven": 1, "three": 6}
PACKING_THREADS = 8


@dataclass(frozen=True)
class Encoded:
    """A packed tensor of bf16: its blocks, where they begin and where the last ends."""

    values: int
    content: Tensor
    begins_bytes: tuple[int, ...]

    @property
    def raw_bytes(self) -> int:
        return 2 * self.values

    @property
    def packed_bytes(self) -> int:
        return self.begins_bytes[-1]

    @property
    def ratio(self) -> float:
        return self.packed_bytes / self.raw_bytes


def encoded(kind: int, tensor: Tensor) -> Encoded:
    """As the core packs it, on the host; then on the tensor's device."""
    raw = tensor.contiguous().view(torch.uint8).cpu()
    nbytes = raw.numel()
    capacity = core().penstock_packed_most_bytes(kind, nbytes)
    packed = torch.empty(capacity, dtype=torch.uint8)
    sizes = (ctypes.c_int64 * (-(-nbytes // BLOCK_BYTES)))()
    packed_bytes = core().penstock_pack_blocks(
        kind, raw.data_ptr(), nbytes, packed.data_ptr(), capacity, sizes, PACKING_THREADS
    )
    if packed_bytes < 0:
        raise RuntimeError("the tensor could not be packed")
    content = packed[:packed_bytes].to(tensor.device, copy=True)
    return Encoded(tensor.numel(), content, tuple(accumulate(sizes, initial=0)))


def launches(packed: Encoded, address: int, out_address: int) -> Iterator[Params]:
    """For blocks that lie at `address`, with values that are to lie at `out_address`."""
    blocks = len(packed.begins_bytes) - 1
    for first in range(0, blocks, MOST_BLOCKS):
        count = min(MOST_BLOCKS, blocks - first)
        begin_bytes = packed.begins_bytes[first]
        params = Params()
        params.packed = address + begin_bytes
        params.out = out_address + first * BLOCK_BYTES
        params.end_value = min(count * BLOCK_BYTES, packed.raw_bytes - first * BLOCK_BYTES) // 2
        params.end_tile = params.total_tiles = -(-params.end_value // TILE_VALUES)
        for i in range(count + 1):
            params.begins[i] = (packed.begins_bytes[first + i] - begin_bytes) // 16
        yield params


Launch = Callable[[Params, int], None]


@dataclass(frozen=True)
class Code:
    """One way to pack, and to decode on the current stream with so many blocks of threads."""

    name: str
    encode: Callable[[Tensor], Encoded]
    launch: Launch

    def decode(self, packed: Encoded, address: int, out: Tensor, blocks: int) -> None:
        for params in launches(packed, address, out.data_ptr()):
            self.launch(params, blocks)


def all_codes() -> dict[str, Code]:
    decoder = Decoder()
    return {name: Code(name, partial(encoded, kind), partial(decoder.launch, kind)) for name, kind in KINDS.items()}
