"""bench.packed_codes without a GPU: its encoder, and its kernels compiled for the host."""

from __future__ import annotations

import ctypes
import random
import shutil
import struct
import subprocess
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.packed_codes import tensors_of
from bench.packed_kernels import launches, seven_codes
from bench.packed_layers import all_chunks, placed
from bench.three_level import ORDERS, Encoded, encoded
from safetensors.torch import save_file
from torch import Tensor

from penstock.weight import Weight
from penstock.weights import layout_identity, write_ptd
from penstock.weights.packing import pack
from tests.runtime.builds import COMPILER, ROOT, SOURCES

BEYOND = 64
KERNELS = {"ranks": "ranks_on_host", "deposit": "deposit_on_host"}


def gaussian(count: int, seed: int = 0) -> Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def every_pattern() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def few_exponents(exponents: tuple[int, ...], count: int) -> Tensor:
    rng = np.random.default_rng(0)
    bits = rng.choice(exponents, count).astype(np.uint16) << 7 | rng.integers(0, 128, count, dtype=np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


CASES: dict[str, Callable[[], Tensor]] = {
    "Gaussian": lambda: gaussian(33_001),
    "every pattern": every_pattern,
    "every pattern, mixed": lambda: every_pattern()[torch.randperm(65536, generator=torch.Generator().manual_seed(1))],
    "one value": lambda: gaussian(1),
    "a tile and one": lambda: gaussian(1025),
    "zeros": lambda: torch.zeros(3000, dtype=torch.bfloat16),
    "not finite, and denormal": lambda: torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38] * 300
    ).bfloat16(),
    # All values of a round, of a lane or of a tile go on to the second level.
    "second level only": lambda: torch.cat([few_exponents((1, 2, 3), 5000), few_exponents((7, 8, 9), 1024)]),
}


def decoded(packed: Encoded, order: str) -> bytes:
    """By the description in bench/three_level.py, a value after another."""
    content = packed.content.numpy().tobytes()
    raw = bytearray()
    for number, begin in enumerate(packed.begins_bytes[:-1]):
        values = min(32768, packed.values - number * 32768)
        raw += decoded_block(content[begin : packed.begins_bytes[number + 1]], values, order)
    return bytes(raw)


def decoded_block(block: bytes, values: int, order: str) -> bytes:
    tiles = -(-values // 1024)
    first_table, second_table = block[0:4], block[8:16]
    planes_at = (16 + 4 * (tiles + 1) + 15) // 16 * 16
    rests_at = planes_at + 256 * tiles
    groups_at = rests_at + 1024 * tiles
    escapes_at = groups_at + 12 * struct.unpack_from("<I", block, 4)[0]
    made = [0] * (1024 * tiles)
    code, escape = 0, 0
    for tile in range(tiles):
        assert struct.unpack_from("<HH", block, 16 + 4 * tile) == (code, escape)
        words = struct.unpack_from("<64I", block, planes_at + 256 * tile)
        places = [(r, lane, a) for r in range(4) for lane in range(32) for a in range(8)]
        if order == "deposit":
            places.sort(key=lambda place: (place[1], 4 * place[2] + place[0]))
        for r, lane, a in places:
            bit = 4 * a + r
            first = (words[lane] >> bit & 1) | (words[32 + lane] >> bit & 1) << 1
            exponent = first_table[first]
            if first == 0:
                group, within = divmod(code, 32)
                bit = 4 * (within % 8) + within // 8 if order == "ranks" else within
                planes = struct.unpack_from("<3I", block, groups_at + 12 * group)
                second = sum((word >> bit & 1) << plane for plane, word in enumerate(planes))
                exponent = second_table[second]
                code += 1
                if second == 0:
                    exponent = block[escapes_at + escape]
                    escape += 1
            index = 1024 * tile + 256 * r + 8 * lane + a
            rest = block[rests_at + index]
            made[index] = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    assert struct.unpack_from("<HH", block, 16 + 4 * tiles) == (code, escape)
    assert len(block) == (escapes_at + escape + 15) // 16 * 16
    return array("H", made[:values]).tobytes()


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_encoded_is_there(case: str, order: str) -> None:
    tensor = CASES[case]()
    assert decoded(encoded(tensor, order), order) == raw_bytes(tensor)


def test_three_levels_are_smaller() -> None:
    weight = gaussian(1 << 20)
    three = {encoded(weight, order).packed_bytes for order in ORDERS}
    assert len(three) == 1
    assert three.pop() / (2 << 20) <= 0.685 < 0.69 < seven_codes(weight).ratio < 0.71


class HostKernels:
    def __init__(self, folder: Path, *flags: str) -> None:
        library = folder / "kernels.so"
        source = str(Path(__file__).with_name("packed_codes_on_host.cpp"))
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-Wno-unknown-pragmas"]
        folders = [f"-I{ROOT / 'bench'}", f"-I{SOURCES}"]
        subprocess.run([COMPILER, *options, *flags, *folders, source, "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def decoded(self, name: str, packed: Encoded, begin: int = 0, end: int | None = None) -> bytes:
        """Values [begin, end), after it has been seen that nothing around them was written."""
        end = packed.values if end is None else end
        out = torch.full((packed.values + BEYOND,), -1, dtype=torch.int16)
        (params,) = launches(packed, packed.content.data_ptr(), out.data_ptr())
        params.begin_value, params.end_value = begin, end
        params.first_tile, params.end_tile = begin // 1024, -(-end // 1024)
        getattr(self._library, name)(ctypes.byref(params))
        assert (out[:begin] == -1).all() and (out[end:] == -1).all()
        return out[begin:end].numpy().tobytes()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no compiler {COMPILER}")
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("case", CASES)
def test_kernels_make_the_same_bits(kernels: HostKernels, case: str) -> None:
    tensor = CASES[case]()
    raw = raw_bytes(tensor)
    for order in ORDERS:
        assert kernels.decoded(KERNELS[order], encoded(tensor, order)) == raw, order
    assert kernels.decoded("seven_codes_on_host", seven_codes(tensor)) == raw


def test_kernels_write_what_is_asked_for(kernels: HostKernels) -> None:
    tensor = gaussian(5000)
    begin, end = 1040, 4001
    for order in ORDERS:
        part = kernels.decoded(KERNELS[order], encoded(tensor, order), begin, end)
        assert part == raw_bytes(tensor[begin:end]), order
    assert kernels.decoded("seven_codes_on_host", seven_codes(tensor), begin, end) == raw_bytes(tensor[begin:end])


def test_damaged_blocks_write_nothing_else(kernels: HostKernels) -> None:
    rng = random.Random(0)
    tensor = every_pattern()[:3000]
    for order in ORDERS:
        for _ in range(4):
            whole = encoded(tensor, order)
            content = bytearray(whole.content.numpy().tobytes())
            for _ in range(50):
                content[rng.randrange(rng.choice((32, len(content))))] = rng.choice((0, 0xFF))
            damaged = torch.frombuffer(content, dtype=torch.uint8).clone()
            kernels.decoded(KERNELS[order], Encoded(whole.values, damaged, whole.begins_bytes))


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.5, 0.6, 0.75, 0.9])
@pytest.mark.parametrize(("resident", "streamed"), [(0.70, 0.70), (0.68, 0.68), (0.70, 0.68)])
def test_a_placement_fills_the_budget(budget: float, resident: float, streamed: float) -> None:
    chunks = all_chunks()
    sizes = [[int(share * chunk.raw_bytes) for chunk in chunks] for share in (resident, streamed)]
    raw_bytes = sum(chunk.raw_bytes for chunk in chunks)
    assert raw_bytes == 6_979_321_856
    placement = placed(chunks, *sizes, budget * raw_bytes)
    # All but the last chunk that did not fit.
    assert 0 <= budget * raw_bytes - placement.device_bytes < 2 * chunks[0].raw_bytes
    assert ("streamed" in placement.places) == (budget < 0.7)
    assert ("raw" in placement.places) == (budget > 0.7)
    assert placement.streamed_bytes == sum(
        size for size, place in zip(sizes[1], placement.places, strict=True) if place == "streamed"
    )


def test_a_budget_below_the_rings_is_refused() -> None:
    chunks = all_chunks(1)
    sizes = [chunk.raw_bytes // 2 for chunk in chunks]
    with pytest.raises(ValueError, match="the rings alone take 100663296 bytes"):
        placed(chunks, sizes, sizes, 100_000_000)


def test_weights_of_a_file_are_those_of_bf16(tmp_path: Path) -> None:
    weights = {"large": gaussian(40_000), "small": gaussian(100), "other": torch.zeros(40_000)}
    save_file(weights, tmp_path / "some.safetensors")
    (found,) = tensors_of(tmp_path / "some.safetensors")
    assert torch.equal(found, weights["large"])
    entry = Weight("large", "bfloat16", (40_000,), (0,))
    write_ptd(tmp_path / "some.ptd", [entry], lambda _: [raw_bytes(found)], identity=layout_identity([entry], ()))
    pack(tmp_path / "some.ptd", tmp_path / "packed.ptd")
    for name in ("some.ptd", "packed.ptd"):
        (found,) = tensors_of(tmp_path / name)
        assert torch.equal(found, weights["large"])
