"""The launching side, without a GPU: the real Python over a driver that runs the kernel's text in the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.direct import kernel_build, split_linear
from penstock.direct.driver_calls import DriverCalls
from penstock.direct.failures import KernelDeviceError, KernelInputError
from penstock.direct.source import Source
from penstock.direct.split_linear import Options, SplitLinear
from penstock.direct.tile_shape import choose_tile
from penstock.errors import DriverCallError
from tests.direct.emulation import EMULATOR, Emulator, whole_numbers

STREAM = 0x7F0000000099


class Emulation(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("host_begin", "host_end")),
        *((name, ctypes.c_int) for name in ("capability_major", "most_clusters", "contexts", "launches")),
        ("stream", ctypes.c_uint64),
        *((name, ctypes.c_uint) for name in ("shared_limit", "portable_only")),
        ("host_bytes_read", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_int),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, machine: Path) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    Emulator(folder, machine, choose_tile(5), more=(EMULATOR / "driver.cpp",))
    return folder / "libemulator.so"


@pytest.fixture
def emulation(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    class Stream:
        cuda_stream = STREAM

    monkeypatch.setattr(split_linear, "DriverCalls", lambda: DriverCalls(str(library)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(kernel_build, "load_nvrtc", lambda major: None)
    monkeypatch.setattr(kernel_build, "cubin_of", lambda *arguments: b"a cubin\0")
    state = Emulation.in_dll(ctypes.CDLL(str(library)), "emulation")
    before = bytes(state)
    yield state
    assert state.contexts == 0
    ctypes.memmove(ctypes.addressof(state), before, len(before))


def on_host(state: Emulation, rest: torch.Tensor) -> torch.Tensor:
    """Says which memory stands for the host's."""
    state.host_begin, state.host_end = rest.data_ptr(), rest.data_ptr() + rest.numel() * 2
    return rest


@pytest.mark.parametrize("prefix_rows", [0, 48, 64, 203])
@pytest.mark.parametrize("options", [Options(), Options(limits=None)])
def test_launch(emulation: Emulation, prefix_rows: int, options: Options) -> None:
    x, weight, bias = whole_numbers(5, 136, seed=1), whole_numbers(203, 136, seed=2), whole_numbers(203, seed=3)
    counter = torch.zeros(1, dtype=torch.int64)
    prefix, rest = weight[:prefix_rows].clone(), on_host(emulation, weight[prefix_rows:].clone())
    kernel = SplitLinear("cuda:0")
    y = kernel(x, prefix, rest, bias, options=options, host_bytes=counter)
    assert torch.equal(y, (x.double() @ weight.double().T + bias.double()).to(torch.bfloat16))
    asked = (203 - prefix_rows) * 136 * 2
    assert counter.item() == emulation.host_bytes_read == asked
    assert (emulation.launches, emulation.stream) == (1, STREAM)
    kernel.close()


def test_views(emulation: Emulation) -> None:
    """Rows that are further apart than they are long, of x and of y; a missing side; a single token."""
    x, weight = whole_numbers(5, 272, seed=1)[:, :136], whole_numbers(64, 136, seed=2)
    buffer = torch.full((5, 72), torch.nan, dtype=torch.bfloat16)
    kernel = SplitLinear("cuda:0")
    kernel(x, weight, None, out=buffer[:, :64])
    assert torch.equal(buffer[:, :64], (x.double() @ weight.double().T).to(torch.bfloat16))
    assert buffer[:, 64:].isnan().all()
    one = kernel(x[:1], None, on_host(emulation, weight))
    assert torch.equal(one, buffer[:1, :64])


def test_refusals(emulation: Emulation) -> None:
    kernel = SplitLinear("cuda:0")
    x, weight = whole_numbers(5, 136, seed=1), whole_numbers(64, 136, seed=2)
    refused: list[tuple[str, tuple[torch.Tensor | None, ...]]] = [
        ("x is torch.float32", (x.float(), weight, None)),
        ("x has the shape", (x[0], weight, None)),
        ("K=12", (x[:, :12], weight[:, :12], None)),
        ("prefix of 8 rows of 64", (x, weight[:8], weight[8:])),
        (r"prefix is torch.float16 \(64, 136\)", (x, weight.half(), None)),
        (r"rest is torch.bfloat16 \(48, 128\)", (x, weight[:16], weight[16:, :128])),
        (r"x has the strides \(1, 5\)", (x.T.contiguous().T, weight, None)),
        (r"x has the strides \(0, 1\)", (x[:1].expand(5, 136), weight, None)),
        ("x starts at .* multiples of 16", (x.flatten()[1:].view(-1)[: 4 * 136].view(4, 136), weight, None)),
        ("prefix starts at .* 276 bytes apart", (x, whole_numbers(64, 138, seed=1)[:, :136], None)),
        (r"bias is .* needs a contiguous torch.bfloat16 \(64,\)", (x, weight, None, weight[0])),
        ("T=0", (x[:0], weight, None)),
        ("N=0", (x, None, None)),
    ]
    for message, operands in refused:
        with pytest.raises(KernelInputError, match=message):
            kernel(*operands)  # type: ignore[arg-type]
    with pytest.raises(KernelInputError, match="out has 4 rows"):
        kernel(x, weight, None, out=x.new_empty(4, 64))
    with pytest.raises(KernelInputError, match="host_bytes is torch.int32"):
        kernel(x, weight, None, host_bytes=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(KernelInputError, match="device cpu"):
        SplitLinear("cpu")
    assert emulation.launches == 0


def test_driver_errors_are_named(emulation: Emulation) -> None:
    x, weight = whole_numbers(5, 136, seed=1), whole_numbers(64, 136, seed=2)
    kernel = SplitLinear("cuda:0")
    # Tokens for which another tile is chosen than the emulator was built for.
    with pytest.raises(DriverCallError, match="cuLaunchKernelEx failed"):
        kernel(whole_numbers(300, 136, seed=1), weight, None)
    emulation.most_clusters = 0
    with pytest.raises(KernelInputError, match="holds 0 clusters"):
        SplitLinear("cuda:0")(x, weight, None)
    # Clusters of 16 did not fit, so those of 8 were tried.
    with pytest.raises(KernelInputError, match="holds 0 clusters of 8 CTAs"):
        SplitLinear("cuda:0").shape(4096, 64, 136, 0, torch.bfloat16, Options())


def test_older_gpus(emulation: Emulation) -> None:
    emulation.capability_major = 8
    with pytest.raises(KernelDeviceError, match=r"this GPU has 8\.0: older"):
        SplitLinear("cuda:0")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, emulation: Emulation) -> list[tuple[str, ...]]:
    """The targets and defines that kernels were compiled for."""
    told: list[tuple[str, ...]] = []

    def cubin_of(nvrtc: None, source: Source, target: str, options: tuple[str, ...]) -> bytes:
        told.append((target, *(option for option in options if "MMA_SYNC" in option or "CLUSTERS" in option)))
        return b"a cubin\0"

    monkeypatch.setattr(kernel_build, "cubin_of", cubin_of)
    return told


def shapes_of(options: Options) -> list[tuple[int, ...]]:
    kernel = SplitLinear("cuda:0")
    tiles = [kernel.shape(tokens, 640, 136, 64, torch.bfloat16, options).tile for tokens in (5, 64, 300, 2048)]
    return [(t.tile_tokens, t.tile_rows, t.token_ctas, t.row_ctas, t.w_stages, t.x_stages) for t in tiles]


def test_which_build_a_gpu_gets(emulation: Emulation, compiled: list[tuple[str, ...]]) -> None:
    """And that a Hopper GPU can be asked for what the others get."""
    hopper = shapes_of(Options())
    assert set(compiled) == {("sm_90a", "-DMMA_SYNC=0", "-DCLUSTERS=1")}
    compiled.clear()
    assert shapes_of(Options(instructions="mma_sync")) == hopper
    assert set(compiled) == {("sm_90a", "-DMMA_SYNC=1", "-DCLUSTERS=1")}
    compiled.clear()
    small = shapes_of(Options(instructions="mma_sync", multicast=False, shared_limit_bytes=101_376))
    assert set(compiled) == {("sm_90a", "-DMMA_SYNC=1", "-DCLUSTERS=0")} and small != hopper
    compiled.clear()
    emulation.capability_major = 10
    assert shapes_of(Options()) == hopper
    assert set(compiled) == {("sm_100a", "-DMMA_SYNC=1", "-DCLUSTERS=1")}
    compiled.clear()
    emulation.capability_major, emulation.shared_bytes = 12, 101_376
    assert shapes_of(Options()) == shapes_of(Options(instructions="mma_sync")) == small
    assert set(compiled) == {("sm_120a", "-DMMA_SYNC=1", "-DCLUSTERS=0")}


def test_launch_on_another_gpu(emulation: Emulation) -> None:
    """Shorter rings, and tokens in turns: the host is asked for its rows once in each."""
    emulation.capability_major, emulation.shared_bytes = 12, 101_376
    weight = whole_numbers(203, 136, seed=2)
    prefix, rest = weight[:48].clone(), on_host(emulation, weight[48:].clone())
    x, counter = whole_numbers(5, 136, seed=1), torch.zeros(1, dtype=torch.int64)
    kernel = SplitLinear("cuda:0")
    y = kernel(x, prefix, rest, host_bytes=counter)
    assert torch.equal(y, (x.double() @ weight.double().T).to(torch.bfloat16))
    assert counter.item() == emulation.host_bytes_read == 155 * 136 * 2
    turns = kernel.shape(2048, 203, 136, 48, torch.bfloat16, Options())
    assert turns.tile.cluster_ctas == 1 and turns.host_bytes == 11 * 155 * 136 * 2
    assert emulation.shared_limit <= 101_376


def test_rings_of_another_length(emulation: Emulation) -> None:
    """Two tiles of one build, in turn: what one was allowed of shared memory is not taken from the other."""
    x, weight = whole_numbers(5, 136, seed=1), whole_numbers(64, 136, seed=2)
    kernel = SplitLinear("cuda:0")
    wanted = (x.double() @ weight.double().T).to(torch.bfloat16)
    for options in (Options(), Options(shared_limit_bytes=50_000), Options()):
        assert torch.equal(kernel(x, weight, None, options=options), wanted)


def test_what_a_gpu_does_not_have_is_refused(emulation: Emulation) -> None:
    kernel = SplitLinear("cuda:0")
    sizes = (64, 640, 136, 64, torch.bfloat16)
    with pytest.raises(KernelInputError, match="shared_limit_bytes is 232,449, and a block on this GPU has 232,448"):
        kernel.shape(*sizes, Options(shared_limit_bytes=232_449))
    with pytest.raises(KernelInputError, match="shared memory of 0 bytes"):
        kernel.shape(*sizes, Options(shared_limit_bytes=0))
    with pytest.raises(KernelInputError, match="instructions is 'wgmma'; it must be 'own' or 'mma_sync'"):
        kernel.shape(*sizes, Options(instructions="wgmma"))  # type: ignore[arg-type]
