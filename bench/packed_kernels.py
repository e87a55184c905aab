"""The codes that bench.packed_codes compares: who encodes them, and the kernels that decode them.

`seven` is the code of docs/format.md, by the kernel that the core carries; `seven-ahead` is the same code by another
kernel (bench/packed_codes.cu), and `ranks` and `deposit` are two kernels for the code of three levels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from bench.decoding import BLOCK_BYTES, CSRC, MOST_BLOCKS, THREADS, TILE_VALUES, Decoder, Params
from bench.three_level import Encoded, encoded
from penstock.direct.nvrtc import cubin_of, cuda_major_of_torch, load_nvrtc
from penstock.direct.source import Source
from penstock.native import core

SOURCE = Path(__file__).with_name("packed_codes.cu")
PACKING_THREADS = 8


def seven_codes(tensor: Tensor) -> Encoded:
    """As the core packs it, on the host; then on the tensor's device."""
    kind = 1
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


class OwnKernels:
    """Those of packed_codes.cu, compiled for the GPU at hand."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context, in which everything else happens
        self._cuda = ctypes.CDLL("libcuda.so.1")
        major, minor = torch.cuda.get_device_capability()
        header = "decode_params.h"
        source = Source(SOURCE.name, SOURCE.read_text(), ((header, (CSRC / header).read_text()),))
        cubin = cubin_of(load_nvrtc(cuda_major_of_torch()), source, f"sm_{major}{minor}", ())
        self._module = ctypes.c_void_p()
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(self._module), cubin))

    def named(self, name: str) -> Launch:
        function = ctypes.c_void_p()
        self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))

        def launch(params: Params, blocks: int) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            size = (blocks, 1, 1, THREADS, 1, 1, 0)
            self._check(self._cuda.cuLaunchKernel(function, *size, stream, arguments, None))

        return launch

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver answered {code}")


def all_codes() -> dict[str, Code]:
    decoder, own = Decoder(), OwnKernels()

    def shipped(params: Params, blocks: int) -> None:
        decoder.launch(1, params, blocks)

    codes = (
        Code("seven", seven_codes, shipped),
        Code("seven-ahead", seven_codes, own.named("seven_codes_ahead")),
        Code("ranks", lambda tensor: encoded(tensor, "ranks"), own.named("three_level_ranks")),
        Code("deposit", lambda tensor: encoded(tensor, "deposit"), own.named("three_level_deposit")),
    )
    return {code.name: code for code in codes}
