"""What DFloat11 takes from cupy, on the CPU: a kernel that is launched by addresses, and decodes value after value.

It decodes as the GPU does: every thread from its own gap, every block from its own position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

THREAD_BYTES = 8
GAP_BITS = 5
# From here on up, an entry is the number of a further table, counted down from 256.
FIRST_POINTER = 240


def module() -> ModuleType:
    cupy = ModuleType("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    vars(cupy).update(RawModule=_RawModule, cuda=SimpleNamespace(Device=_device))
    return cupy


class _RawModule:
    def __init__(self, path: str) -> None:
        assert path.endswith("decode.ptx")

    def get_function(self, name: str) -> Any:
        assert name == "decode"
        return _decode


@contextmanager
def _device(index: int | None) -> Iterator[None]:
    assert index is None  # the CPU has no number
    yield


def _decode(grid: tuple[int], block: tuple[int], shared_mem: int, args: Sequence[int]) -> None:
    luts_at, data_at, others_at, positions_at, gaps_at, out_at, tables, data_bytes, values = args
    luts = [_bytes(luts_at + 256 * index, 256) for index in range(tables)]
    data = _bytes(data_at, data_bytes)
    others = _bytes(others_at, values)
    positions = (ctypes.c_uint32 * (grid[0] + 1)).from_address(positions_at)
    gaps = int.from_bytes(_bytes(gaps_at, grid[0] * block[0] * GAP_BITS // 8), "big")
    gap_bits = grid[0] * block[0] * GAP_BITS
    out = (ctypes.c_uint16 * values).from_address(out_at)
    for number in range(grid[0]):
        at = positions[number]
        for thread in range(number * block[0], (number + 1) * block[0]):
            gap = gaps >> (gap_bits - (thread + 1) * GAP_BITS) & (1 << GAP_BITS) - 1
            bit = thread * THREAD_BYTES * 8 + gap
            while bit < min((thread + 1) * THREAD_BYTES, data_bytes) * 8 and at < positions[number + 1]:
                exponent = _symbol(luts, data, bit)
                out[at] = (others[at] & 0x80) << 8 | exponent << 7 | others[at] & 0x7F
                bit += luts[-1][exponent]
                at += 1
        assert at == positions[number + 1]
        # What a block decodes is gathered in shared memory, behind a word for each thread.
        assert 4 * block[0] + 4 + 2 * (at - positions[number]) <= shared_mem


def _symbol(luts: Sequence[bytes], data: bytes, bit: int) -> int:
    window = int.from_bytes(data[bit // 8 : bit // 8 + 5].ljust(5, b"\0"), "big") << bit % 8 & (1 << 40) - 1
    table = 0
    for shift in (32, 24, 16, 8):
        found = luts[table][window >> shift & 0xFF]
        if found < FIRST_POINTER:
            return found
        table = 256 - found
    raise AssertionError("a code has more than 32 bits")


def _bytes(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)
