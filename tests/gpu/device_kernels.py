"""The decoding kernels on a GPU, one launch at a time, in memory of exactly the size that they may touch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bench.decoding import Decoder, Params

from tests.weights.block_stress import GUARD_BYTES, VALUE_BYTES
from tests.weights.kernel_stress import launch_params

_GUARD = 0xA5
_THREAD_BLOCKS = 4


class DeviceKernels:
    """As Kernels of tests/weights/kernel_stress.py, which runs them on the host."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def decoded(self, kind: int, blocks: list[bytes], raw_bytes: int, begin: int, end: int) -> bytes:
        """Values [begin, end) of a weight that has so many bytes in these blocks, written between guards."""
        packed, out_bytes = b"".join(blocks), (end - begin) * VALUE_BYTES[kind]
        whole_bytes = out_bytes + 2 * GUARD_BYTES
        # Of exactly its size: for memcheck a read behind it is one outside of an allocation.
        with self._memory(len(packed)) as packed_at, self._memory(whole_bytes) as whole_at:
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(packed_at), packed, ctypes.c_size_t(len(packed)))
            self._call("cuMemsetD8_v2", ctypes.c_uint64(whole_at), ctypes.c_uint8(_GUARD), ctypes.c_size_t(whole_bytes))
            params = launch_params(kind, packed_at, whole_at + GUARD_BYTES, blocks, raw_bytes, begin, end)
            self._decoder.launch(kind, Params.from_buffer_copy(params), _THREAD_BLOCKS)
            torch.cuda.synchronize()
            whole = ctypes.create_string_buffer(whole_bytes)
            self._call("cuMemcpyDtoH_v2", whole, ctypes.c_uint64(whole_at), ctypes.c_size_t(whole_bytes))
        guard = bytes([_GUARD]) * GUARD_BYTES
        assert whole.raw[:GUARD_BYTES] == guard and whole.raw[GUARD_BYTES + out_bytes :] == guard, "written beside it"
        return whole.raw[GUARD_BYTES : GUARD_BYTES + out_bytes]

    @contextmanager
    def _memory(self, count_bytes: int) -> Iterator[int]:
        """Not torch's, which gives out parts of larger allocations."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count_bytes))
        try:
            yield address.value
        finally:
            self._call("cuMemFree_v2", address)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} answered {code}")
