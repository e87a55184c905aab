"""What the ops compute, in plain torch: the implementation on the CPU, and what the kernels are compared with.

A sequence is put together from both sides before any arithmetic, so the bits are the same wherever the sides meet. All
arithmetic is in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kv.failures import KVCacheFullError


def append(device_kv: Tensor, host_kv: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> None:
    near = device_kv.shape[3]
    extents = _extents(starts, counts, near + host_kv.shape[3])
    for sequence, (start, count) in enumerate(extents):
        split = min(max(near - start, 0), count)
        for index, new in enumerate((k, v)):
            rows = new[sequence, :, :count]
            device_kv[index, sequence, :, start : start + split] = rows[:, :split]
            begin = start + split - near
            if split < count:
                host_kv[index, sequence, :, begin : begin + count - split] = rows[:, split:]


def attend(
    q: Tensor, device_kv: Tensor, host_kv: Tensor, starts: Tensor, counts: Tensor, scale: float, host_programs: int
) -> Tensor:
    """Like the kernels' attention, but `host_programs` has no effect: there is no link to congest."""
    near = device_kv.shape[3]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for sequence, (start, count) in enumerate(_extents(starts, counts, near + host_kv.shape[3])):
        length = start + count
        if not count:
            continue
        query = _by_kv_head(q[sequence, :, :count].float() * scale, device_kv.shape[2])
        reach = torch.arange(start, length, device=q.device).repeat(query.shape[1] // count)
        keys, values = _whole(device_kv[:, sequence], host_kv[:, sequence], length)
        positions = torch.arange(length, device=q.device)
        scores = torch.matmul(query, keys.transpose(1, 2)).masked_fill(positions > reach[:, None], -torch.inf)
        attended = torch.matmul(torch.softmax(scores, dim=-1), values)
        out[sequence, :, :count] = attended.view(q.shape[1], count, q.shape[3]).to(q.dtype)
    return out


def _by_kv_head(query: Tensor, kv_heads: int) -> Tensor:
    """Puts the heads of one group one after the other, so that each key is used for all of them at once."""
    heads, count, head_dim = query.shape
    return query.reshape(kv_heads, heads // kv_heads * count, head_dim)


def _whole(near: Tensor, far: Tensor, length: int) -> Tensor:
    """Positions up to the length: what lies beyond may be anything, NaN included. Always a copy, so that the arithmetic
    finds the same strides and alignment at every split."""
    held = min(length, near.shape[2])
    whole = near.new_empty((*near.shape[:2], length, near.shape[3]), dtype=torch.float32)
    whole[:, :, :held] = near[:, :, :held]
    whole[:, :, held:] = far[:, :, : length - held]
    return whole


def _extents(starts: Tensor, counts: Tensor, capacity: int) -> list[tuple[int, int]]:
    extents = list(zip(starts.tolist(), counts.tolist(), strict=True))
    for sequence, (start, count) in enumerate(extents):
        if start + count > capacity:
            raise KVCacheFullError(
                f"sequence {sequence} of the KV cache would be {start + count} positions long; it holds {capacity}",
                sequence=sequence,
                length=start + count,
                capacity=capacity,
            )
    return extents
