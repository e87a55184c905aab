"""bench.packed_codes without a GPU: what it launches, where it places weights, and what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.decoding import MOST_BLOCKS
from bench.packed_codes import tensors_of
from bench.packed_kernels import KINDS, encoded, launches
from bench.packed_layers import all_chunks, placed
from safetensors.torch import save_file
from torch import Tensor

from penstock.weight import Weight
from penstock.weights import layout_identity, write_ptd
from penstock.weights.packing import pack


def gaussian(count: int, seed: int = 0) -> Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_three_levels_are_smaller() -> None:
    weight = gaussian(1 << 20)
    ratios = {name: encoded(kind, weight).ratio for name, kind in KINDS.items()}
    assert ratios["three"] <= 0.685 < 0.69 < ratios["seven"] < 0.71


@pytest.mark.parametrize("name", KINDS)
def test_launches_cover_a_tensor(name: str) -> None:
    """Of more blocks than one launch takes, with a short one at the end."""
    packed = encoded(KINDS[name], gaussian(MOST_BLOCKS * 32768 + 1025))
    first, last = launches(packed, packed.content.data_ptr(), 1 << 20)
    assert (first.end_value, first.total_tiles) == (MOST_BLOCKS * 32768, MOST_BLOCKS * 32)
    assert (last.end_value, last.total_tiles) == (1025, 2)
    assert last.out - first.out == MOST_BLOCKS * 65536
    begins = [*first.begins[: MOST_BLOCKS + 1]]
    assert last.packed - first.packed == 16 * begins[-1] == packed.begins_bytes[MOST_BLOCKS]
    assert packed.begins_bytes[MOST_BLOCKS] + 16 * last.begins[1] == packed.packed_bytes == packed.content.numel()


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
