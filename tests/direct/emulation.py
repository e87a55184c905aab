"""The kernel's own text, compiled by the C++ compiler over emulated instructions, and run on the CPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.direct.launch_shape import LaunchShape
from penstock.direct.params import SPLIT_PARAMS_BYTES, TensorMap, aligned_params, fill_shape
from penstock.direct.schedule import GRAIN
from penstock.direct.tile_shape import TileShape

KERNELS = Path(__file__).parents[2] / "src" / "penstock" / "direct" / "kernels"
EMULATOR = Path(__file__).parent / "emulator"
CORE = Path(__file__).parents[2] / "csrc"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-clobbered", "-fPIC"]

AT_RANDOM, AT_ONCE, LATE = 0, 1, 2


@dataclass(frozen=True)
class Emulated:
    """What a run left behind."""

    y: torch.Tensor
    failure: str
    host_bytes_counted: int
    host_bytes_read: int


def compile_cpp(*arguments: object) -> None:
    command = [os.environ.get("CXX", "g++"), *FLAGS, *map(str, arguments)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0 and not built.stderr, built.stderr


def build_machine(folder: Path) -> Path:
    target = folder / "machine.o"
    # Which tile does not matter here: the header only declares functions of it.
    compile_cpp("-DTILE_TOKENS=8", f"-I{KERNELS}", "-c", EMULATOR / "machine.cpp", "-o", target)
    return target


class Emulator:
    """One build of the kernel. `edits` replace text in it, each found exactly once, to see that the tests notice."""

    def __init__(
        self,
        folder: Path,
        machine: Path,
        tile: TileShape,
        edits: tuple[tuple[str, str], ...] = (),
        more: tuple[Path, ...] = (),
        mma_sync: bool = False,
    ) -> None:
        self.tile = tile
        sources = folder / "kernels"
        shutil.copytree(KERNELS, sources)
        texts = {name: (sources / name).read_text() for name in ("split_linear.cu", "mma_sync.h")}
        for old, new in edits:
            found = [name for name, text in texts.items() for _ in range(text.count(old))]
            assert len(found) == 1, f"{old!r} is in the kernel {len(found)} times"
            texts[found[0]] = texts[found[0]].replace(old, new)
        for name, text in texts.items():
            (sources / name).write_text(text)
        library = folder / "libemulator.so"
        defines = {
            "PENSTOCK_EMULATED": 1,
            "TILE_TOKENS": tile.tile_tokens,
            "TILE_WARPGROUPS": tile.tile_warpgroups,
            "ELEMENT_BF16": 1,
            "BOUNDED_WAITS": 0,
            "MMA_SYNC": int(mma_sync),
            "CLUSTERS": int(not mma_sync or tile.cluster_ctas > 1),
        }
        compile_cpp(
            *(f"-D{name}={value}" for name, value in defines.items()),
            *(f"-I{EMULATOR}", f"-I{sources}", f"-I{CORE}", "-shared"),
            *(EMULATOR / "kernel.cpp", *more, machine, "-o", library),
        )
        self._library = ctypes.CDLL(str(library))
        self._library.emulate.restype = ctypes.c_char_p
        assert self._library.emulated_params_bytes() == SPLIT_PARAMS_BYTES

    def run(
        self,
        shape: LaunchShape,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        y_stride: int | None = None,
        copies_land: int = AT_RANDOM,
        seed: int = 0,
    ) -> Emulated:
        prefix_rows = min(shape.schedule.split_row, shape.schedule.rows)
        prefix, rest = weight[:prefix_rows].clone(), weight[prefix_rows:].clone()
        tokens, rows = x.shape[0], weight.shape[0]
        # A row more and columns more than are written, all NaN.
        y = torch.full((tokens + 1, y_stride or rows), torch.nan, dtype=x.dtype)
        counter = torch.zeros(1, dtype=torch.int64)
        params = aligned_params()
        fill_shape(params, shape)
        params.x = emulated_map(x, self.tile.x_box_rows, on_host=False)
        # A side without rows is never asked.
        for side, tensor, on_host in (("prefix", prefix, False), ("rest", rest, True)):
            setattr(params, side, emulated_map(tensor, self.tile.w_box_rows, on_host=on_host))
            setattr(params, f"{side}_16", emulated_map(tensor, GRAIN, on_host=on_host))
        params.y_address, params.y_stride = y.data_ptr(), y.stride(0)
        params.bias_address = 0 if bias is None else bias.data_ptr()
        params.host_bytes_address = counter.data_ptr()
        read = ctypes.c_uint64()
        failure = self._library.emulate(
            ctypes.byref(params),
            shape.schedule.clusters,
            self.tile.cluster_ctas,
            self.tile.shared_bytes,
            copies_land,
            ctypes.c_uint64(seed),
            ctypes.byref(read),
        )
        return Emulated(y, failure.decode(), int(counter.item()), read.value)


def emulated_map(tensor: torch.Tensor, box_rows: int, *, on_host: bool) -> TensorMap:
    rows, columns = tensor.shape
    words = (tensor.data_ptr(), columns, rows, tensor.stride(0) * 2, box_rows, int(on_host))
    return TensorMap((ctypes.c_uint64 * 16)(*words))


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Small whole numbers: every sum of products is exact, so results are equal or wrong."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)
