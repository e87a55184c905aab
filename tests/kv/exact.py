"""Attention in fp64, straight from the definition, and how far from it a result may be."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the mean of the absolute values under the attention's own weights. A weight is rounded to the dtype before
# it meets its value, and the result once more: two roundings of half a unit in the last place each. Of bf16, which has
# 8 significant bits, that half is 2**-8 of the number; of fp16, with 11, it is 2**-11.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-16}


def attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Of one sequence: q [heads, tokens, dim] at positions from `start` on, k and v [kv_heads, length, dim].

    Returns the output, and the same over absolute values.
    """
    group = q.shape[0] // k.shape[0]
    keys, values = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.double() @ keys.transpose(1, 2) * q.shape[2] ** -0.5
    reach = torch.arange(start, start + q.shape[1], device=q.device)
    hidden = torch.arange(k.shape[1], device=q.device)[None, :] > reach[:, None]
    shares = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return shares @ values, shares @ values.abs()


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, start: int) -> None:
    exact, scale = attention(q, k, v, start)
    error = ((out.double() - exact).abs() / scale).max().item()
    # Not `<` alone: NaN is no number that is too large.
    assert error == error and error <= TOLERANCE[out.dtype], f"error {error}, tolerance {TOLERANCE[out.dtype]}"


class Ragged:
    """A batch of sequences kept whole on one side of the test, and handed to a cache step by step on the other."""

    def __init__(
        self, *, kv_heads: int, group: int, head_dim: int, lengths: list[int], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths) * 1000 + sum(lengths))
        longest = max(lengths)

        def draw(heads: int) -> Tensor:
            numbers = torch.randn(len(lengths), longest, heads, head_dim, generator=generator)
            # As projections leave them: tokens before heads in memory.
            return numbers.to(dtype).to(device).transpose(1, 2)

        self.q, self.k, self.v = draw(kv_heads * group), draw(kv_heads), draw(kv_heads)
        self.lengths = lengths

    def chunk(self, starts: list[int], tokens: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """The next `tokens` of every sequence, and how many of them there are; padding is NaN."""
        counts = [min(tokens, length - start) for length, start in zip(self.lengths, starts, strict=True)]
        chunks = []
        for whole in (self.q, self.k, self.v):
            part = whole.new_full((len(starts), whole.shape[1], tokens, whole.shape[3]), torch.nan)
            for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
                part[b, :, :count] = whole[b, :, start : start + count]
            chunks.append(part)
        return chunks[0], chunks[1], chunks[2], counts

    def check(self, out: Tensor, starts: list[int], counts: list[int]) -> None:
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            assert not out[b, :, count:].any(), "padding attends to nothing"
            if count:
                end = start + count
                check(out[b, :, :count], self.q[b, :, start:end], self.k[b, :, :end], self.v[b, :, :end], start)
