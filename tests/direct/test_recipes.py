"""Recipes and the core's launch of them, without a GPU: over a driver that runs the kernel's text in the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.direct import kernel_build, self_check, split_linear
from penstock.direct.driver_calls import DriverCalls
from penstock.direct.failures import KernelDeviceError, KernelInputError
from penstock.direct.launch_shape import Limits
from penstock.direct.recipes import LinearCase, LinearRecipe, Recipes
from penstock.direct.tile_shape import choose_tile
from tests.direct.emulation import CORE, EMULATOR, Emulator, whole_numbers
from tests.direct.test_split_linear import STREAM, Emulation, on_host

TOKENS, ROWS, DEPTH = 5, 203, 136


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, machine: Path) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    more = (EMULATOR / "driver.cpp", EMULATOR / "launch.cpp", CORE / "cuda/cuda_linear.cpp")
    Emulator(folder, machine, choose_tile(TOKENS), more=more)
    return folder / "libemulator.so"


@pytest.fixture
def emulation(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    monkeypatch.setattr(split_linear, "DriverCalls", lambda: DriverCalls(str(library)))
    monkeypatch.setattr(kernel_build, "load_nvrtc", lambda major: None)
    monkeypatch.setattr(kernel_build, "cubin_of", lambda *arguments: b"a cubin\0")
    state = Emulation.in_dll(ctypes.CDLL(str(library)), "emulation")
    before = bytes(state)
    yield state
    assert state.contexts == 0
    ctypes.memmove(ctypes.addressof(state), before, len(before))


def aligned_recipe() -> LinearRecipe:
    """As the core has it."""
    buffer = (ctypes.c_char * (ctypes.sizeof(LinearRecipe) + 128))()
    return LinearRecipe.from_buffer(buffer, -ctypes.addressof(buffer) % 128)


def case_of(prefix: torch.Tensor, rest: torch.Tensor, tokens: int = TOKENS) -> LinearCase:
    return LinearCase(
        access=3,
        tokens=tokens,
        rows=prefix.shape[0] + rest.shape[0],
        depth=prefix.shape[1],
        prefix_rows=prefix.shape[0],
        prefix_address=prefix.data_ptr(),
        rest_address=rest.data_ptr(),
        is_bf16=int(prefix.dtype == torch.bfloat16),
    )


def prepared(recipes: Recipes, case: LinearCase) -> LinearRecipe:
    recipe = aligned_recipe()
    recipes.prepare(ctypes.addressof(case), ctypes.addressof(recipe))
    return recipe


def launched(
    library: Path, recipe: LinearRecipe, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> tuple[int, str]:
    call = ctypes.c_char_p()
    code = ctypes.CDLL(str(library)).launch_prepared(
        ctypes.byref(recipe),
        *(ctypes.c_uint64(tensor.data_ptr() if tensor is not None else 0) for tensor in (x, y, bias)),
        *(ctypes.c_int64(number) for number in (x.stride(0), y.stride(0), *x.shape)),
        int(x.dtype == torch.bfloat16),
        ctypes.c_void_p(STREAM),
        ctypes.byref(call),
    )
    return code, (call.value or b"").decode()


@pytest.mark.parametrize("prefix_rows", [0, 48, 64, ROWS])
def test_a_recipe_serves_call_after_call(emulation: Emulation, library: Path, prefix_rows: int) -> None:
    weight = whole_numbers(ROWS, DEPTH, seed=2)
    prefix, rest = weight[:prefix_rows].clone(), on_host(emulation, weight[prefix_rows:].clone())
    recipes = Recipes("cuda:0")
    recipe = prepared(recipes, case_of(prefix, rest))
    before = bytes(recipe)
    for seed in range(2):
        x = whole_numbers(TOKENS, DEPTH, seed=10 + seed)
        for bias in (None, whole_numbers(ROWS, seed=20 + seed)):
            y = torch.full((TOKENS, ROWS), torch.nan, dtype=torch.bfloat16)
            emulation.contexts += 1  # the session's
            assert launched(library, recipe, x, bias, y)[0] == 0
            emulation.contexts -= 1
            added = 0.0 if bias is None else bias.double()
            assert torch.equal(y, (x.double() @ weight.double().T + added).to(torch.bfloat16))
    assert bytes(recipe) == before
    assert (emulation.launches, emulation.stream) == (4, STREAM)
    assert emulation.host_bytes_read == 4 * (ROWS - prefix_rows) * DEPTH * 2
    recipes.close()


def test_a_call_that_fails_is_named(emulation: Emulation, library: Path) -> None:
    weight, x = whole_numbers(ROWS, DEPTH, seed=2), whole_numbers(TOKENS, DEPTH, seed=1)
    recipe = prepared(Recipes("cuda:0"), case_of(weight, weight[:0]))
    y = torch.empty(TOKENS, ROWS, dtype=torch.bfloat16)
    odd = torch.zeros(TOKENS * DEPTH + 1, dtype=torch.bfloat16)[1:].view(TOKENS, DEPTH)
    assert launched(library, recipe, odd, None, y) == (1, "cuTensorMapEncodeTiled")
    # The emulator is built for the other kind of floats.
    assert launched(library, recipe, x.half(), None, y) == (1, "cuTensorMapEncodeTiled")
    # No context is current.
    assert launched(library, recipe, x, None, y) == (1, "cuLaunchKernelEx")


def test_limits_are_those_that_were_given(emulation: Emulation) -> None:
    weight = whole_numbers(ROWS, DEPTH, seed=2)
    case = case_of(weight[:16].clone(), on_host(emulation, weight[16:].clone()))
    facing = [
        prepared(Recipes("cuda:0", limits), case).params.schedule.host_clusters
        for limits in (None, Limits(), Limits(host_ctas=1))
    ]
    assert facing[0] == facing[1] > facing[2]


def test_what_the_kernel_cannot_take_is_refused(emulation: Emulation) -> None:
    weight = whole_numbers(ROWS, DEPTH, seed=2)
    with pytest.raises(KernelInputError, match="a prefix of 8 rows of 203"):
        prepared(Recipes("cuda:0"), case_of(weight[:8], weight[8:]))


def test_a_gpu_of_another_kind_is_checked_first(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel that the recipes are for; one that fails leaves none."""
    told: list[tuple[torch.device, tuple[int, int]]] = []

    def check(launch: object, device: torch.device, capability: tuple[int, int]) -> None:
        told.append((device, capability))
        raise KernelDeviceError("wrong sums")

    monkeypatch.setattr(self_check, "check_products", check)
    monkeypatch.setattr(self_check, "_checked", set())
    Recipes("cuda:0").close()
    assert not told
    emulation.capability_major = 12
    with pytest.raises(KernelDeviceError, match="wrong sums"):
        Recipes("cuda:0")
    assert told == [(torch.device("cuda:0"), (12, 0))]


def test_closing_tells_what_failed(
    emulation: Emulation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = whole_numbers(ROWS, DEPTH, seed=2)
    recipes = Recipes("cuda:0")
    prepared(recipes, case_of(weight, weight[:0]))
    monkeypatch.setattr(DriverCalls, "unload", lambda self, module: self._call("cuModuleUnload", ctypes.c_void_p(5)))
    recipes.close()
    assert "could not be unloaded: cuModuleUnload failed" in capsys.readouterr().err
