"""A decoder with a split KV cache, compiled for a GPU: its host side is state that kernels reach in host memory.

`python -m tests.gpu.test_kv_compiled_cuda NEAR FOLDER` compiles one; the tests start them side by side.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import decoder
from torch import Tensor

import penstock
from penstock.kv import mapped_tensor
from penstock.runtime.automatic_budget import activation_bound_bytes
from tests.kv.decoder import SplitDecoder, cache_of, generate, generate_plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
CFG = dataclasses.replace(decoder.TINY, max_len=150)
PROMPTS = [[(n * n + 3) % 251 for n in range(125)], [250, 1], [n % 7 + 60 for n in range(60)]]
AMOUNT = 16
# Everything far; a cut inside the longest prompt, and behind another one.
NEARS = (0, 64)
STATES = [f"cache.kv_{layer}" for layer in range(CFG.layers)]
HOST_STATES = [f"cache.host_kv_{layer}" for layer in range(CFG.layers)]
POSITION_BYTES = 2 * CFG.kv_heads * CFG.head_dim * CFG.dtype.itemsize * len(PROMPTS)


def a_model(near: int, device: str = "cpu") -> SplitDecoder:
    plain = decoder.build(CFG, cached=True, seed=1).to(device)
    return SplitDecoder(plain, cache_of(CFG, len(PROMPTS), near, device=device)).requires_grad_(False)


def compile_split(near: int, folder: Path) -> None:
    model, batch = a_model(near), len(PROMPTS)
    numbers = torch.zeros(batch, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
    seq = torch.export.Dim("seq", min=2, max=CFG.max_len)
    programs = {}
    for name, width, dynamic in (("prefill", 4, ({1: seq}, None, None)), ("decode", 1, None)):
        with torch.no_grad():
            example = (torch.zeros(batch, width, dtype=torch.int64), *numbers)
            programs[name] = penstock.apply_weight_offload(torch.export.export(model, example, dynamic_shapes=dynamic))
    folder.mkdir(parents=True, exist_ok=True)
    penstock.compile(programs, folder / "model.pt2", device=DEVICE)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Kept in PENSTOCK_GPU_PROGRAMS where that is set."""
    kept = os.environ.get("PENSTOCK_GPU_PROGRAMS")
    folder = Path(kept) / "kv" if kept else tmp_path_factory.mktemp("kv")
    paths = {near: folder / f"{near}" / "model.pt2" for near in NEARS}
    children = {
        near: subprocess.Popen([sys.executable, "-m", "tests.gpu.test_kv_compiled_cuda", str(near), str(path.parent)])
        for near, path in paths.items()
        if not path.exists()
    }
    assert {near: child.wait() for near, child in children.items()} == dict.fromkeys(children, 0)
    return paths


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    plain = decoder.build(CFG, cached=True, seed=1).to(DEVICE)
    tokens = [generate_plain(plain, prompt, AMOUNT) for prompt in PROMPTS]
    assert len({tuple(t) for t in tokens}) == len(PROMPTS), "sequences that are alike show little"
    return tokens


def run_with(module: penstock.Module, model: SplitDecoder) -> list[list[int]]:
    """The lengths are the model's cache's business; the keys and values are the compiled program's own."""

    def run(tokens: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        return module.run_method("prefill" if tokens.shape[1] > 1 else "decode", tokens, starts, counts)

    return [tokens[:AMOUNT] for tokens in generate(model, PROMPTS, AMOUNT, 4, run=run)]


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("near", NEARS)
def test_the_same_tokens_as_with_a_plain_cache(
    compiled: dict[int, Path], expected: list[list[int]], near: int, cuda_graph: bool
) -> None:
    """With all weights resident and at the floor; again with the same module, which starts a new text."""
    with penstock.Module(compiled[near], "1GiB") as module:
        floor = module.floor_bytes
    model = a_model(near, DEVICE)
    for budget in ("1GiB", floor):
        with penstock.Module(compiled[near], budget, cuda_graph=cuda_graph) as module:
            for _ in range(2):
                assert run_with(module, model) == expected
            assert (module.stats().replays > 0) == cuda_graph
    assert not any(side.any() for side in model.cache.buffers()), "the model's own cache was not what was used"


@pytest.mark.parametrize("near", NEARS)
def test_the_far_side_lies_in_host_memory(compiled: dict[int, Path], near: int) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with penstock.Module(compiled[near], "1GiB") as module:
        program = module.program
        assert [state.name for state in program.states if state.host] == HOST_STATES
        far_bytes = CFG.layers * (CFG.max_len - near) * POSITION_BYTES
        assert program.host_state_bytes == far_bytes
        near_bytes = program.state_bytes - far_bytes
        assert near_bytes == CFG.layers * near * POSITION_BYTES
        # What is on the device is rounded up by torch, 512 bytes a tensor; the far side is none of it.
        taken = torch.cuda.memory_allocated() - before
        assert near_bytes <= taken <= near_bytes + 512 * len(program.states) < far_bytes
        for method in program.methods:
            for name, tensor in zip(method.states, module._state.tensors(method), strict=True):
                assert tensor.device == module.device
                host = module._state._buffers[name]
                if name in HOST_STATES:
                    assert host.device.type == "cpu" and host.is_pinned()
                    assert tensor.shape == host.shape and tensor.dtype == host.dtype
                else:
                    assert host.data_ptr() == tensor.data_ptr()


def test_state_is_read_written_and_reset_where_it_lies(compiled: dict[int, Path], expected: list[list[int]]) -> None:
    model = a_model(64, DEVICE)
    with penstock.Module(compiled[64], "1GiB") as module:
        assert not any(module.read_state(name).any() for name in STATES)
        assert run_with(module, model) == expected
        kept = {name: module.read_state(name) for name in STATES}
        assert {value.device.type for value in kept.values()} == {"cpu"}
        # What an eager run leaves in the cache, up to the arithmetic of the layers before it.
        generate(model, PROMPTS, AMOUNT, 4)
        torch.cuda.synchronize()
        for name, value in kept.items():
            sides = (name.removeprefix("cache."), f"host_{name.removeprefix('cache.')}")
            wanted = torch.cat([model.cache.get_buffer(side).cpu() for side in sides], dim=3)
            torch.testing.assert_close(value.cpu(), wanted, rtol=1e-3, atol=1e-3)
        held = torch.tensor(model.cache.lengths, dtype=torch.int32, device=DEVICE)
        step = torch.tensor([[7], [8], [9]], device=DEVICE), held - 1, torch.ones_like(held)
        wanted = module.run_method("decode", *step).clone()
        module.reset_state()
        assert not any(module.read_state(name).any() for name in STATES)
        assert not torch.equal(module.run_method("decode", *step), wanted), "an empty cache says something else"
        # One from host memory, one from the device: either may be written.
        for name, value in kept.items():
            module.write_state(name, value.to(DEVICE) if name.endswith("0") else value)
        assert torch.equal(module.run_method("decode", *step), wanted)
    # Another load starts anew.
    with penstock.Module(compiled[64], "1GiB") as module:
        assert not any(module.read_state(name).any() for name in STATES)
        assert run_with(module, model) == expected


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("near", NEARS)
def test_the_same_bits_at_every_total(compiled: dict[int, Path], near: int, cuda_graph: bool) -> None:
    """From everything far to everything near, whatever the cap was at export; bytes as the allocator counts them."""
    block = 64 * CFG.layers * POSITION_BYTES
    program = penstock.read_program(compiled[near])
    activations = activation_bound_bytes(program) * (2 if cuda_graph else 1)
    with penstock.Module(compiled[near], "1GiB") as module:
        floor, full = module.floor_bytes, module.full_bytes
    model = a_model(near, DEVICE)
    outs: list[list[Tensor]] = []
    splits = set[int]()
    for room in (floor, floor + block, full + block, full + 2 * block, full + program.state_bytes):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with penstock.Module(compiled[near], device_memory=room + activations, cuda_graph=cuda_graph) as module:
            taken = torch.cuda.memory_allocated() - before
            assert module.device_state_bytes <= taken <= module.device_state_bytes + 512 * len(program.states)
            assert module.budget_bytes + module.device_state_bytes <= room
            splits.add(module.device_state_bytes)
            seen: list[Tensor] = []

            def run(tokens: Tensor, starts: Tensor, counts: Tensor, module: Any = module, seen: Any = seen) -> Tensor:
                out = module.run_method("prefill" if tokens.shape[1] > 1 else "decode", tokens, starts, counts)
                seen.append(out.clone())
                return out

            generate(model, PROMPTS, AMOUNT, 70, run=run)
            outs.append([*seen, *(module.read_state(name) for name in STATES)])
    assert len(splits) >= 4
    for found in outs:
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, outs[0], strict=True))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_registrations_end_with_the_module(compiled: dict[int, Path]) -> None:
    gc.collect()
    held = len(mapped_tensor._held)
    for _ in range(5):
        module = penstock.Module(compiled[0], "1GiB")
        assert len(mapped_tensor._held) == held + CFG.layers
        module.close()
        del module
        gc.collect()
        assert len(mapped_tensor._held) == held


if __name__ == "__main__":
    compile_split(int(sys.argv[1]), Path(sys.argv[2]))
