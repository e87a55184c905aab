"""The decoding kernels of csrc/packed/decode.cu, compiled for the host: what they make of blocks, whole and damaged."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.runtime.builds import COMPILER, SOURCES
from tests.weights.block_stress import GUARD_BYTES, VALUE_BYTES, check_guards, guarded, packed_block
from tests.weights.packed_cases import DTYPES, gaussian

MOST_BLOCKS = 960
TILE_VALUES = 1024
BLOCK_BYTES = 65536


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


def build(folder: Path, *flags: str) -> Path:
    library = folder / "kernels.so"
    source = str(Path(__file__).with_name("kernel_on_host.cpp"))
    options = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-pthread", "-Wno-unknown-pragmas", f"-I{SOURCES}"]
    subprocess.run([COMPILER, *options, *flags, source, "-o", str(library)], check=True)
    return library


def launch_params(
    kind: int, packed: int, out: int, blocks: list[bytes], raw_bytes: int, begin: int, end: int
) -> Params:
    """Of a launch that puts value `begin` to `out`, from blocks that lie at `packed`."""
    value_bytes = VALUE_BYTES[kind]
    params = Params(packed, out - begin * value_bytes)
    params.begin_value, params.end_value = begin, end
    params.first_tile, params.end_tile = begin // TILE_VALUES, -(-end // TILE_VALUES)
    params.total_tiles = -(-(raw_bytes // value_bytes) // TILE_VALUES)
    for number, block in enumerate(blocks):
        params.begins[number + 1] = params.begins[number] + len(block) // 16
    return params


class Kernels:
    def __init__(self, library: Path) -> None:
        self._decode = ctypes.CDLL(str(library)).decode_on_host

    def decoded(self, kind: int, blocks: list[bytes], raw_bytes: int, begin: int, end: int) -> bytes:
        """Values [begin, end) of a weight that has so many bytes in these blocks, written between guards."""
        value_bytes = VALUE_BYTES[kind]
        # Of exactly its size, so that a read behind it is one outside of an allocation.
        packed = (ctypes.c_char * sum(map(len, blocks))).from_buffer_copy(b"".join(blocks))
        whole, out = guarded((end - begin) * value_bytes)
        params = launch_params(kind, ctypes.addressof(packed), out, blocks, raw_bytes, begin, end)
        self._decode(kind, ctypes.byref(params))
        check_guards(whole, (end - begin) * value_bytes)
        return whole.raw[GUARD_BYTES : GUARD_BYTES + (end - begin) * value_bytes]


def blocks_of(kind: int, raw: bytes) -> list[bytes]:
    return [packed_block(kind, raw[begin : begin + BLOCK_BYTES]) for begin in range(0, len(raw), BLOCK_BYTES)]


def stress(kernels: Kernels, seed: int) -> None:
    """Blocks that are damaged, or cut short: only what is read or written outside of them matters."""
    rng = random.Random(seed)
    for kind, value_bytes in VALUE_BYTES.items():
        for values in (1, 1025, 3000):
            raw = rng.randbytes(values * value_bytes)
            for _ in range(4):
                block = bytearray(packed_block(kind, raw))
                for _ in range(50):
                    block[rng.randrange(rng.choice((16, len(block))))] = rng.choice((0, 0xFF))
                del block[len(block) - 16 * rng.randrange(values // 64 + 1) :]
                kernels.decoded(kind, [bytes(block)], len(raw), 0, values)


def some_values(kind: int) -> dict[str, bytes]:
    dtype, value_bytes = DTYPES[kind], VALUE_BYTES[kind]
    patterns = np.arange(65536, dtype=np.uint8 if value_bytes == 1 else np.uint16)
    return {
        "Gaussian": gaussian(dtype, BLOCK_BYTES // value_bytes + 2000),
        "every pattern": patterns.tobytes() if value_bytes < 4 else (patterns.astype(np.uint32) * 65537).tobytes(),
        "anything": np.random.default_rng(0).bytes(5000 * value_bytes),
        "one": b"\xff" * value_bytes,
        "zeros": bytes(1030 * value_bytes),
    }


if __name__ == "__main__":
    if sys.argv[2] == "overrun":  # shows that the check can fail: a block without half of its rests
        block = packed_block(6, bytes(4096))
        Kernels(Path(sys.argv[1])).decoded(6, [block[: len(block) // 2]], 4096, 0, 2048)
    else:
        stress(Kernels(Path(sys.argv[1])), seed=1)
    print("done")
