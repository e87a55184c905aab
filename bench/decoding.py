"""How fast packed weights are decoded out of device memory, by thread blocks; and DFloat11's, where it is importable.

    python -m bench.decoding [--out FILE.json]

Every bit pattern of a dtype and tensors that pack badly are decoded first, and compared. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import dfloat11_decoding
from penstock.native import core

CSRC = Path(__file__).parents[1] / "csrc"
BLOCK_BYTES = 64 * 1024
MOST_BLOCKS = 960
TILE_VALUES = 1024
# By kind: the dtype, and the kernel. bfloat16 has two codes: 6 is written now, and 1 is what earlier files have.
KINDS = {
    6: (torch.bfloat16, "penstock_decode_bfloat16_levels"),
    1: (torch.bfloat16, "penstock_decode_bfloat16"),
    2: (torch.float32, "penstock_decode_float32"),
    3: (torch.float16, "penstock_decode_float16"),
    4: (torch.float8_e4m3fn, "penstock_decode_float8_e4m3"),
    5: (torch.float8_e5m2, "penstock_decode_float8_e5m2"),
}
# By bytes of a value.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
THREADS = 256


class Params(ctypes.Structure):
    """csrc/packed/decode_params.h"""

    _fields_ = (
        ("packed", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("first_tile", ctypes.c_uint32),
        ("end_tile", ctypes.c_uint32),
        ("begin_value", ctypes.c_uint32),
        ("end_value", ctypes.c_uint32),
        ("total_tiles", ctypes.c_uint32),
        ("begins", ctypes.c_uint32 * (MOST_BLOCKS + 1)),
    )


class Decoder:
    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context, in which everything else happens
        self._cuda = ctypes.CDLL("libcuda.so.1")
        ptx = "".join(re.findall(r'(?s)R"ptx\((.*?)\)ptx"', (CSRC / "packed/decode_ptx.inc").read_text()))
        module = ctypes.c_void_p()
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(module), ptx.encode()))
        self._functions = {}
        for kind, (_, name) in KINDS.items():
            function = ctypes.c_void_p()
            self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            self._functions[kind] = function

    def launch(self, kind: int, params: Params, blocks: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        size = (blocks, 1, 1, THREADS, 1, 1, 0)
        self._check(self._cuda.cuLaunchKernel(self._functions[kind], *size, stream, arguments, None))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver answered {code}")


class Packed:
    """A tensor, packed on the host, in device memory."""

    def __init__(self, kind: int, tensor: torch.Tensor) -> None:
        self.kind = kind
        self.values = tensor.numel()
        self.nbytes = tensor.numel() * tensor.element_size()
        raw = tensor.contiguous().view(torch.uint8)
        capacity = core().penstock_packed_most_bytes(kind, self.nbytes)
        packed = torch.empty(capacity, dtype=torch.uint8)
        sizes = (ctypes.c_int64 * (-(-self.nbytes // BLOCK_BYTES)))()
        self.packed_bytes = core().penstock_pack_blocks(
            kind, raw.data_ptr(), self.nbytes, packed.data_ptr(), capacity, sizes, 8
        )
        if self.packed_bytes < 0:
            raise RuntimeError("the tensor could not be packed")
        self.begins = array("Q", [0])
        for size in sizes:
            self.begins.append(self.begins[-1] + size)
        self.on_device = packed[: self.packed_bytes].cuda()

    def launches(self, out: torch.Tensor) -> Iterator[Params]:
        item = self.nbytes // self.values
        blocks = len(self.begins) - 1
        for first in range(0, blocks, MOST_BLOCKS):
            count = min(MOST_BLOCKS, blocks - first)
            params = Params()
            params.packed = self.on_device.data_ptr() + self.begins[first]
            params.out = out.data_ptr() + first * BLOCK_BYTES
            values = min(count * BLOCK_BYTES, self.nbytes - first * BLOCK_BYTES) // item
            params.end_value = values
            params.end_tile = params.total_tiles = -(-values // TILE_VALUES)
            for i in range(count + 1):
                params.begins[i] = (self.begins[first + i] - self.begins[first]) // 16
            yield params


def cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    integer = INTEGERS[dtype.itemsize]
    yield "Gaussian", (torch.randn(300_001, generator=generator) * 0.02).to(dtype)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    every = (patterns << 16) | (patterns & 0xFFFF) if dtype is torch.float32 else patterns.to(integer)
    yield "every pattern", every.view(dtype)
    yield "anything", torch.randint(-(2**15), 2**15, (100_003,), generator=generator).to(integer).view(dtype)
    for count in (1, 7, 8, 1023, 1024, 1025, 32767, 32768, 32769, 65537):
        yield f"{count} values", torch.randn(count, generator=generator).to(dtype)
    yield "zeros", torch.zeros(70_000, dtype=dtype)


def differs(decoder: Decoder, kind: int, tensor: torch.Tensor) -> bool:
    packed = Packed(kind, tensor)
    integer = INTEGERS[tensor.dtype.itemsize]
    # Nothing behind the end is written.
    beyond = torch.full((8,), float("nan")).to(tensor.dtype).view(integer)
    out = torch.cat([torch.zeros(packed.values, dtype=integer), beyond]).cuda()
    for params in packed.launches(out):
        decoder.launch(kind, params, 64)
    return not torch.equal(out.cpu(), torch.cat([tensor.view(integer), beyond]))


def seconds(work: Callable[[], None], times: int = 10) -> float:
    for _ in range(3):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times * 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    decoder = Decoder()
    wrong = [
        f"kind {kind} {name}"
        for kind, (dtype, _) in KINDS.items()
        for name, tensor in cases(dtype)
        if differs(decoder, kind, tensor)
    ]
    print("differs:", wrong or "nothing")
    rows = []
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for kind, (dtype, _) in KINDS.items():
        packed = Packed(kind, (torch.randn(14336 * 4096) * 0.02).to(dtype))
        out = torch.empty(packed.values, dtype=dtype, device="cuda")
        launches = list(packed.launches(out))
        for blocks in (
            processors // 8,
            processors // 4,
            processors // 2,
            processors,
            2 * processors,
            4 * processors,
            8 * processors,
        ):

            def work(kind: int = kind, launches: list[Params] = launches, blocks: int = blocks) -> None:
                for params in launches:
                    decoder.launch(kind, params, blocks)

            rate = packed.nbytes / seconds(work)
            rows.append(
                {
                    "dtype": str(dtype),
                    "kind": kind,
                    "blocks": blocks,
                    "bytes_per_s": rate,
                    "ratio": packed.packed_bytes / packed.nbytes,
                }
            )
            ratio = packed.packed_bytes / packed.nbytes
            print(f"{dtype} kind {kind} ratio {ratio:.4f} blocks {blocks:5d}: {rate / 1e9:7.1f} GB/s")
    peer = dfloat11_decoding.measure(seconds)
    if peer["missing"]:
        print(f"DFloat11: missing, {peer['missing']}")
    for row in peer["rows"]:
        result = "equal" if row["equal"] else "WRONG"
        print(
            f"DFloat11 ratio {row['ratio']:.4f} {row['values']} values, {result}: {row['bytes_per_s'] / 1e9:7.1f} GB/s"
        )
    if given.out:
        made_on = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        given.out.write_text(json.dumps(made_on | {"rows": rows, "dfloat11": peer}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
