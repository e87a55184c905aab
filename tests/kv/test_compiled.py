"""A compiled program with a cache on both sides: how much of it lies on the device is chosen when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import BelowFloorError
from penstock.kv import HostKVCache
from penstock.runtime.automatic_budget import activation_bound_bytes

HIDDEN, CAPACITY, LAYERS = 128, 330, 4
# One head of 16 numbers for keys and for values.
POSITION_BYTES = LAYERS * 2 * 16 * 4
BLOCK_BYTES = 64 * POSITION_BYTES


class Attention(nn.Module):
    """Layers of attention, two heads over one; the cap holds one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.ModuleList(nn.Linear(HIDDEN, 64, bias=False) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(32, HIDDEN, bias=False) for _ in range(LAYERS))
        self.cache = HostKVCache(
            layers=LAYERS,
            batch=1,
            kv_heads=1,
            head_dim=16,
            max_length=CAPACITY,
            device_cap_bytes=BLOCK_BYTES,
            dtype=torch.float32,
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        for layer in range(LAYERS):
            heads = self.into[layer](x).view(1, -1, 4, 16).transpose(1, 2)
            y = self.cache(layer, heads[:, :2], heads[:, 2:3], heads[:, 3:], starts, counts)
            x = x + self.out[layer](y.transpose(1, 2).reshape(1, -1, 32))
        return x


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split") / "model.pt2"
    tokens = torch.export.Dim("tokens", min=1, max=CAPACITY)
    numbers = torch.zeros(1, dtype=torch.int32), torch.full((1,), 4, dtype=torch.int32)
    with torch.no_grad():
        program = torch.export.export(
            Attention(), (torch.zeros(1, 4, HIDDEN), *numbers), dynamic_shapes=({1: tokens}, None, None)
        )
    penstock.compile(penstock.apply_weight_offload(program), path, device="cpu")
    return path


def text() -> Tensor:
    return torch.randn(1, 325, HIDDEN, generator=torch.Generator().manual_seed(1))


def played(module: Any, amounts: tuple[int, ...] = (200, 1, 1, 120, 1, 2)) -> list[Tensor]:
    """Chunks and single tokens over all borders; and the caches they leave behind."""
    module.reset_state()
    outs, start = [], 0
    for amount in amounts:
        numbers = torch.tensor([start], dtype=torch.int32), torch.tensor([amount], dtype=torch.int32)
        outs.append(module(text()[:, start : start + amount], *numbers))
        start += amount
    return [*outs, *(module.read_state(f"cache.kv_{layer}") for layer in range(LAYERS))]


def test_the_same_bits_at_every_total(compiled: Path) -> None:
    program = penstock.read_program(compiled)
    activations = activation_bound_bytes(program)
    with penstock.Module(compiled, "1GiB") as module:
        floor, full = module.floor_bytes, module.full_bytes
        assert module.device_state_bytes == BLOCK_BYTES, "with a budget for weights, the cache's own cap holds"
        assert "KV cache 64 of 330 positions on the device" in module.summary
        wanted = played(module)
    all_bytes = CAPACITY * POSITION_BYTES
    assert floor < full and program.state_bytes == all_bytes
    # Bytes above what activations take; of them those for weights and for caches, half of which come first.
    cases = {
        floor: (floor, 0),
        floor + BLOCK_BYTES - 1: (floor + BLOCK_BYTES - 1, 0),
        floor + BLOCK_BYTES: (floor, BLOCK_BYTES),
        floor + 2 * BLOCK_BYTES + 5: (floor + 5, 2 * BLOCK_BYTES),
        full + 2 * BLOCK_BYTES: (full, 2 * BLOCK_BYTES),
        full + 3 * BLOCK_BYTES: (full, 3 * BLOCK_BYTES),
        full + 4 * BLOCK_BYTES: (full, 4 * BLOCK_BYTES),
        full + 5 * BLOCK_BYTES: (full, 5 * BLOCK_BYTES),
        full + all_bytes: (full, all_bytes),
    }
    for room, (weights, near) in cases.items():
        with penstock.Module(compiled, device_memory=room + activations) as module:
            assert (module.budget_bytes, module.device_state_bytes) == (weights, near)
            assert module._state.device_bytes == near and module.state_bytes == all_bytes
            found = played(module)
            assert module.device_memory()[1] <= weights
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), room
    assert len({near for _, near in cases.values()}) >= 6


def test_a_byte_less_than_the_smallest_total_is_refused_with_its_terms(compiled: Path) -> None:
    activations = activation_bound_bytes(penstock.read_program(compiled))
    with penstock.Module(compiled, "1GiB") as module:
        floor = module.floor_bytes
    with pytest.raises(BelowFloorError) as caught:
        penstock.Module(compiled, device_memory=floor + activations - 1)
    assert (
        f"the smallest for this program is {floor + activations} bytes: at least {floor} for weights, 0 for state and "
        f"{activations} for activations"
    ) in str(caught.value)
    penstock.Module(compiled, device_memory=floor + activations).close()


def test_state_moves_between_modules_that_are_split_elsewhere(compiled: Path) -> None:
    activations = activation_bound_bytes(penstock.read_program(compiled))
    with penstock.Module(compiled, "1GiB") as module:
        floor = module.floor_bytes
        wanted = played(module)
    with penstock.Module(compiled, device_memory=floor + activations) as first:
        kept = played(first, (200, 1, 1))[-LAYERS:]
    with penstock.Module(compiled, device_memory="1GiB") as second:
        for layer, value in enumerate(kept):
            second.write_state(f"cache.kv_{layer}", value)
        numbers = torch.tensor([202], dtype=torch.int32), torch.tensor([120], dtype=torch.int32)
        assert torch.equal(second(text()[:, 202:322], *numbers), wanted[3])


def test_an_eager_model_gives_what_it_gives_compiled(compiled: Path) -> None:
    with penstock.Module(compiled, "1GiB") as module:
        out = module(text()[:, :100], torch.zeros(1, dtype=torch.int32), torch.tensor([100], dtype=torch.int32))
    model = Attention()
    step = model.cache.begin(100)
    torch.testing.assert_close(out, model(text()[:, :100], step.starts, step.counts), rtol=1e-4, atol=1e-4)
