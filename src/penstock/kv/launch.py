"""How the kernels are launched. No length is looked at on the host: a step can be captured into a CUDA graph.

The host side is an ordinary CPU tensor over memory that is registered with the device; Triton takes it, asks the driver
for the device's address and passes that on. Or it is a tensor of the device that begins at that address. Kernels see no
difference: which programs face the host, and so how many read over the link, goes by the argument.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from penstock.kv import kernels, movement
from penstock.kv.layout import MOST_MULTIPROCESSORS, SLOTS, STAGING_BYTES, lay_out

STAGED_SLOTS = 128
APPENDED_TOKENS = 16
MERGED_SPLITS = 16
MERGED_ROWS = 4


def append(device_kv: Tensor, host_kv: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> None:
    batch, kv_heads, tokens, head_dim = k.shape
    k, v = _rows(k), _rows(v)
    grid = math.ceil(tokens / APPENDED_TOKENS), batch * kv_heads
    movement.append_tokens[grid](
        device_kv,
        host_kv,
        k,
        v,
        starts,
        counts,
        *k.stride()[:3],
        *v.stride()[:3],
        kv_heads,
        device_kv.shape[3],
        device_kv.stride(0),
        host_kv.shape[3],
        host_kv.stride(0),
        HEAD_DIM=head_dim,
        TOKENS=APPENDED_TOKENS,
        COLUMNS=_columns(head_dim),
    )


def attend(
    q: Tensor,
    device_kv: Tensor,
    host_kv: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    host_programs: int,
    staging_bytes: int = STAGING_BYTES,
) -> Tensor:
    batch, heads, tokens, head_dim = q.shape
    kv_heads = device_kv.shape[2]
    group = heads // kv_heads
    layout = lay_out(
        batch=batch,
        kv_heads=kv_heads,
        rows=group * tokens,
        position_bytes=2 * batch * kv_heads * head_dim * q.element_size(),
        device_positions=device_kv.shape[3],
        host_positions=host_kv.shape[3],
        host_programs=host_programs,
        multiprocessors=_multiprocessors(q.device),
        staging_bytes=staging_bytes,
    )
    q = _rows(q)
    columns = _columns(head_dim)
    # Results of both sides, in fp32: rounded once, after they are merged.
    partial_out = q.new_empty((layout.splits, batch, heads * tokens, head_dim), dtype=torch.float32)
    partial_log = q.new_empty((layout.splits, batch, heads * tokens), dtype=torch.float32)

    def partials(near: Tensor, first: int, positions: int, splits: int, first_split: int, far_splits: int) -> None:
        far_programs = min(host_programs, batch * kv_heads * layout.row_blocks * far_splits)
        programs = far_programs + batch * kv_heads * layout.row_blocks * splits
        if not programs:
            return
        kernels.attend_partials[(programs,)](
            q,
            near,
            host_kv,
            starts,
            counts,
            partial_out,
            partial_log,
            *q.stride()[:3],
            batch,
            kv_heads,
            tokens,
            first,
            positions,
            near.stride(2),
            near.stride(0),
            host_kv.shape[3],
            host_kv.stride(2),
            host_kv.stride(0),
            splits,
            far_splits,
            first_split,
            far_programs,
            layout.row_blocks,
            scale * math.log2(math.e),
            GROUP=group,
            HEAD_DIM=head_dim,
            ROWS=layout.rows,
            # Tiles of one size in bytes, so that three of keys and of values fit beside the rest.
            SLOTS=SLOTS * 2 // q.element_size(),
            COLUMNS=columns,
            UPCAST=INTERPRETED,
            num_warps=4 if columns <= 128 else 8,
            num_stages=3 if columns <= 128 else 2,
        )

    partials(device_kv, 0, device_kv.shape[3], layout.device_splits, 0, layout.host_splits)
    if layout.pieces:
        staging = q.new_empty((2, batch, kv_heads, layout.staged_positions, head_dim))
        for piece in range(layout.pieces):
            slot = piece * layout.staged_positions
            movement.stage_slots[(host_programs,)](
                host_kv,
                staging,
                starts,
                counts,
                batch,
                kv_heads,
                device_kv.shape[3],
                host_kv.shape[3],
                slot,
                layout.staged_positions,
                HEAD_DIM=head_dim,
                SLOTS=STAGED_SLOTS,
                COLUMNS=columns,
                num_warps=8,
            )
            partials(
                staging,
                device_kv.shape[3] + slot,
                min(layout.staged_positions, host_kv.shape[3] - slot),
                layout.staged_splits,
                layout.device_splits + piece * layout.staged_splits,
                0,
            )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = batch * heads * tokens
    kernels.merge_partials[(math.ceil(rows / MERGED_ROWS),)](
        partial_out,
        partial_log,
        out,
        starts,
        counts,
        rows,
        kv_heads,
        tokens,
        layout.splits,
        device_kv.shape[3] + host_kv.shape[3],
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=MERGED_ROWS,
        SPLITS=MERGED_SPLITS,
        COLUMNS=columns,
    )
    return out


# Triton's interpreter takes a bf16 for the integer of its bits in a matrix product.
INTERPRETED = type(kernels.attend_partials).__name__ == "InterpretedFunction"


def _rows(tensor: Tensor) -> Tensor:
    """Kernels take any strides but that of the last dimension, along which they read 16 bytes at a time."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _columns(head_dim: int) -> int:
    """Matrix products want a power of two, and 16 at the least."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return min(int(torch.cuda.get_device_properties(device).multi_processor_count), MOST_MULTIPROCESSORS)
