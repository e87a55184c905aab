"""The kernels under Triton's interpreter. Run by test_kernels.py in a process of its own: Triton decides when it is
imported whether it interprets, for the whole process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from penstock.kv import launch, reference
from penstock.kv.split import BLOCK_POSITIONS, CacheShape, Split, step_traffic
from tests.kv.exact import TOLERANCE, Ragged

# The interpreter cuts a bf16 off where a GPU rounds it: twice the error.
TOLERANCE[torch.bfloat16] *= 2


class Sides:
    """Both sides of one layer, full of NaN."""

    def __init__(self, tokens: Ragged, split: Split) -> None:
        batch, kv_heads, _, head_dim = tokens.k.shape
        self.split = split
        self.near, self.far = (
            torch.full((2, batch, kv_heads, positions, head_dim), torch.nan, dtype=tokens.k.dtype)
            for positions in (split.device_positions, split.host_positions)
        )

    def append(self, k: Tensor, v: Tensor, starts: list[int], counts: list[int]) -> None:
        launch.append(self.near, self.far, k, v, torch.tensor(starts), torch.tensor(counts))

    def attend(self, q: Tensor, starts: list[int], counts: list[int], **options: int) -> Tensor:
        scale = q.shape[3] ** -0.5
        given = {"host_programs": 2, **options}
        return launch.attend(q, self.near, self.far, torch.tensor(starts), torch.tensor(counts), scale, **given)


@pytest.mark.parametrize(
    ("dtype", "near", "kv_heads"),
    [
        (torch.bfloat16, 0, 1),
        (torch.bfloat16, 64, 2),
        (torch.bfloat16, 200, 1),
        (torch.float16, 64, 1),
        (torch.float32, 64, 1),
    ],
)
def test_steps_across_the_boundary(dtype: torch.dtype, near: int, kv_heads: int) -> None:
    """Ragged prefill, then tokens, at every step against fp64; the sides end up as the reference leaves them."""
    tokens = Ragged(kv_heads=kv_heads, group=2, head_dim=20, lengths=[75, 3], dtype=dtype)
    split = Split(near, 200 - near)
    sides, wanted = Sides(tokens, split), Sides(tokens, split)
    starts = [0, 0]
    for amount in (68, 2, 1, 4):
        q, k, v, counts = tokens.chunk(starts, amount)
        sides.append(k, v, starts, counts)
        reference.append(wanted.near, wanted.far, k, v, torch.tensor(starts), torch.tensor(counts))
        for found, expected in ((sides.near, wanted.near), (sides.far, wanted.far)):
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        if amount < 68:
            tokens.check(sides.attend(q, starts, counts), starts, counts)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert starts == tokens.lengths


@pytest.mark.parametrize(("near", "group"), [(0, 8), (64, 8), (200, 1)])
def test_a_chunk_of_several_blocks_of_rows(near: int, group: int) -> None:
    """Two blocks of rows: nine tokens of eight heads, or seventy of one. What is far is staged in pieces."""
    tokens = Ragged(kv_heads=1, group=group, head_dim=16, lengths=[150, 12], dtype=torch.float16)
    sides = Sides(tokens, Split(near, 200 - near))
    amount = 70 if group == 1 else 9
    first = [length - min(amount, length) for length in tokens.lengths]
    q, k, v, counts = tokens.chunk([0, 0], 150)
    sides.append(k, v, [0, 0], counts)
    q, _, _, counts = tokens.chunk(first, amount)
    tokens.check(sides.attend(q, first, counts, staging_bytes=64 * 2 * 2 * 16 * 2), first, counts)


@pytest.mark.parametrize(
    ("dtype", "group", "tokens_in_step"),
    [(torch.bfloat16, 4, 1), (torch.float32, 2, 3), (torch.float16, 4, 20), (torch.float32, 1, 70)],
)
@pytest.mark.parametrize("multiprocessors", [1, 5])
def test_the_same_bits_wherever_the_sides_meet(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, group: int, tokens_in_step: int, multiprocessors: int
) -> None:
    """Tokens, for which the far side is read in place, and chunks, for which it is staged in pieces of any size. With
    few multiprocessors a part has several blocks, or several of the tiles that it takes in turn."""
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: multiprocessors)
    lengths = [590 if tokens_in_step == 1 else 330, 100]
    capacity = lengths[0] + 10
    tokens = Ragged(kv_heads=1, group=group, head_dim=16, lengths=lengths, dtype=dtype)
    starts = [length - tokens_in_step for length in lengths]
    q, _, _, counts = tokens.chunk(starts, tokens_in_step)
    _, k, v, whole = tokens.chunk([0, 0], lengths[0])
    block_bytes = BLOCK_POSITIONS * 2 * 2 * 16 * dtype.itemsize
    outs = []
    for near, programs, blocks in ((capacity, 1, 1), (0, 2, 1), (64, 3, 2), (128, 1, 3), (256, 5, 1), (320, 2, 9)):
        sides = Sides(tokens, Split(near, capacity - near))
        reference.append(sides.near, sides.far, k, v, torch.tensor([0, 0]), torch.tensor(whole))
        outs.append(sides.attend(q, starts, counts, host_programs=programs, staging_bytes=blocks * block_bytes))
    tokens.check(outs[0], starts, counts)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_the_same_bits_whatever_lies_beyond() -> None:
    tokens = Ragged(kv_heads=1, group=2, head_dim=16, lengths=[180, 70], dtype=torch.bfloat16)
    sides = Sides(tokens, Split(64, 136))
    _, k, v, counts = tokens.chunk([0, 0], 180)
    sides.append(k, v, [0, 0], counts)
    starts, counts = [179, 69], [1, 1]
    q, _, _, _ = tokens.chunk(starts, 1)
    outs = [sides.attend(q, starts, counts)]
    for side in (sides.near, sides.far):
        side.nan_to_num_(nan=1e4)
    outs.append(sides.attend(q, starts, counts))
    assert torch.equal(outs[0], outs[1])
    assert not outs[0].isnan().any()


def test_nan_in_a_position_that_counts_is_seen() -> None:
    tokens = Ragged(kv_heads=1, group=1, head_dim=16, lengths=[100], dtype=torch.float16)
    sides = Sides(tokens, Split(64, 76))
    _, k, v, counts = tokens.chunk([0], 100)
    sides.append(k, v, [0], counts)
    q, _, _, _ = tokens.chunk([99], 1)
    for side, slot in ((sides.near, 20), (sides.far, 20)):
        kept = side[0, 0, 0, slot].clone()
        side[0, 0, 0, slot] = torch.nan
        assert sides.attend(q, [99], [1]).isnan().all()
        side[0, 0, 0, slot] = kept
    assert not sides.attend(q, [99], [1]).isnan().any()


def test_a_length_that_does_not_fit_gives_nan_and_writes_nothing() -> None:
    tokens = Ragged(kv_heads=1, group=2, head_dim=16, lengths=[8, 8], dtype=torch.float32)
    sides = Sides(tokens, Split(64, 4))
    for side in (sides.near, sides.far):
        side.fill_(1.0)
    # What follows the host side in memory would be the next thing to be overwritten.
    around = torch.zeros(2, *sides.far.shape[1:])
    whole = torch.cat((sides.far.reshape(-1), around.reshape(-1)))
    sides.far = whole[: sides.far.numel()].view(sides.far.shape)
    q, k, v, _ = tokens.chunk([0, 0], 8)
    sides.append(k[:, :, :3], v[:, :, :3], [0, 66], [3, 3])
    assert not whole[sides.far.numel() :].any()
    assert (sides.far[:, 0] == 1).all(), "nor is what follows within it"
    out = sides.attend(q[:, :, :3], [0, 66], [3, 3])
    assert out[1].isnan().all()
    assert not out[0].isnan().any()


@pytest.mark.parametrize(("tokens_in_step", "host_programs"), [(1, 3), (9, 2)])
def test_bytes_over_the_link_are_those_reported(
    monkeypatch: pytest.MonkeyPatch, tokens_in_step: int, host_programs: int
) -> None:
    """Counted load by load: what is far is read once, by each kv head for all its query heads, and nothing else is.

    Nine tokens of eight heads are more than one block of rows: they are staged.
    """
    tokens = Ragged(kv_heads=2, group=8, head_dim=16, lengths=[190, 120], dtype=torch.float16)
    split = Split(64, 136)
    sides = Sides(tokens, split)
    q, k, v, counts = tokens.chunk([0, 0], 190)
    sides.append(k, v, [0, 0], counts)
    starts, counts = [190 - tokens_in_step, 120], [tokens_in_step, 0]
    q = tokens.chunk(starts, tokens_in_step)[0]
    low = sides.far.data_ptr()
    high = low + sides.far.nbytes
    seen: list[np.ndarray] = []
    load = interpreter.interpreter_builder.create_masked_load

    def counting(pointers, mask, *rest):
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        seen.append(addresses[(addresses >= low) & (addresses < high)])
        return load(pointers, mask, *rest)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_masked_load", counting)
    out = sides.attend(q, starts, counts, host_programs=host_programs)
    tokens.check(out, starts, counts)
    read = np.concatenate(seen)
    assert len(np.unique(read)) == len(read), "an element crossed the link twice"
    shape = CacheShape(1, 2, 2, 16, 2)
    assert len(read) * 2 == step_traffic(shape, split, starts, counts).link_read_bytes > 0
