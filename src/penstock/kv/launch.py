"""Launches the kernels. The host looks at no length, so a step can be captured into a CUDA graph. Where the sides meet
decides how many launches there are and which of them reads what, but not what is added to what.

The host side is an ordinary CPU tensor over memory that is registered with the device; Triton asks the driver for the
device's address and passes that on. Or it is a device tensor that begins at that address. Kernels see no difference: an
argument decides which programs face the host, and so how many read over the link.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from penstock.kv import kernels, movement
from penstock.kv.layout import MOST_MULTIPROCESSORS, STAGING_BYTES, lay_out, tile_slots
from penstock.kv.split import BLOCK_POSITIONS

STAGED_SLOTS = 128
APPENDED_TOKENS = 16
# On an H200, 1 and 4 rows and 16 to 64 parts differed by less than 5%, in either direction.
MERGED_PARTS = 32
MERGED_ROWS = 1


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
    near, far = device_kv.shape[3], host_kv.shape[3]
    layout = lay_out(
        batch=batch,
        kv_heads=kv_heads,
        rows=group * tokens,
        position_bytes=2 * batch * kv_heads * head_dim * q.element_size(),
        element_bytes=q.element_size(),
        capacity=near + far,
        multiprocessors=_multiprocessors(q.device),
        staging_bytes=staging_bytes,
    )
    q = _rows(q)
    columns = _columns(head_dim)
    # Results of parts, in fp32: rounded once, after they are merged.
    part_out = q.new_empty((layout.parts, batch, heads * tokens, head_dim), dtype=torch.float32)
    part_top, part_total = q.new_empty((2, layout.parts, batch, heads * tokens), dtype=torch.float32)

    def attend_parts(positions: range, far_kv: Tensor, far_first: int, facing: int) -> None:
        kernels.attend_parts[(facing + batch * kv_heads * layout.row_blocks * layout.parts,)](
            q,
            device_kv,
            far_kv,
            starts,
            counts,
            part_out,
            part_top,
            part_total,
            *q.stride()[:3],
            batch,
            kv_heads,
            tokens,
            near + far,
            near,
            far_first,
            far_kv.shape[3],
            positions.start,
            positions.stop,
            layout.parts,
            facing,
            layout.row_blocks,
            scale * math.log2(math.e),
            GROUP=group,
            HEAD_DIM=head_dim,
            ROWS=layout.rows,
            SLOTS=tile_slots(q.element_size()),
            BLOCK=BLOCK_POSITIONS,
            COLUMNS=columns,
            UPCAST=INTERPRETED,
            INTERLEAVED=layout.is_staged,
            num_warps=4 if columns <= 128 else 8,
            num_stages=3 if columns <= 128 else 2,
        )

    if not layout.is_staged:
        attend_parts(range(near + far), host_kv, near, host_programs if far else 0)
    elif near:
        attend_parts(range(near), host_kv, near, 0)
    pieces = layout.pieces(far)
    if pieces:
        staging = q.new_empty((2, batch, kv_heads, len(pieces[0]), head_dim))
    for slots in pieces:
        movement.stage_slots[(host_programs,)](
            host_kv,
            staging,
            starts,
            counts,
            batch,
            kv_heads,
            near,
            far,
            slots.start,
            staging.shape[3],
            HEAD_DIM=head_dim,
            SLOTS=STAGED_SLOTS,
            COLUMNS=columns,
            num_warps=8,
        )
        # Each launch goes on from what the ones before it left: in the order of positions, wherever pieces begin.
        attend_parts(range(near + slots.start, near + slots.stop), staging, near + slots.start, 0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = batch * heads * tokens
    kernels.merge_parts[(math.ceil(rows / MERGED_ROWS),)](
        part_out,
        part_top,
        part_total,
        out,
        starts,
        counts,
        rows,
        kv_heads,
        tokens,
        layout.parts,
        near + far,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=MERGED_ROWS,
        PARTS=MERGED_PARTS,
        COLUMNS=columns,
    )
    return out


# In a matrix product, Triton's interpreter treats a bf16 as the integer of its bits.
INTERPRETED = type(kernels.attend_parts).__name__ == "InterpretedFunction"


def _rows(tensor: Tensor) -> Tensor:
    """Kernels take any strides, but the last one must be 1: along it they read 16 bytes at a time."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _columns(head_dim: int) -> int:
    """Matrix products need a power of two, and at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return min(int(torch.cuda.get_device_properties(device).multi_processor_count), MOST_MULTIPROCESSORS)
