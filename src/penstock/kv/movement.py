# mypy: ignore-errors
"""The kernels that move keys and values, in Triton: into the cache, and from its host side into device memory."""

import triton
import triton.language as tl


@triton.jit
def append_tokens(
    device_kv,
    host_kv,
    k,
    v,
    starts,
    counts,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    v_batch_stride,
    v_head_stride,
    v_token_stride,
    kv_heads,
    device_positions,
    device_value_offset,
    host_positions,
    host_value_offset,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of tokens of one kv head of one sequence, keys or values, to the side that each position belongs to."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    sequence = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    start = tl.load(starts + sequence).to(tl.int32)
    count = tl.load(counts + sequence).to(tl.int32)
    columns = tl.arange(0, COLUMNS)
    in_head = columns[None, :] < HEAD_DIM
    position = start + token
    new = (token < count) & (position < device_positions + host_positions)
    near = new & (position < device_positions)
    far = new & (position >= device_positions)
    line = (sequence * kv_heads + head).to(tl.int64)
    at = line * device_positions * HEAD_DIM + position[:, None] * HEAD_DIM + columns[None, :]
    host_at = line * host_positions * HEAD_DIM + (position - device_positions)[:, None] * HEAD_DIM + columns[None, :]

    key_at = sequence.to(tl.int64) * k_batch_stride + head * k_head_stride + token[:, None] * k_token_stride
    keys = tl.load(k + key_at + columns[None, :], mask=new[:, None] & in_head, other=0.0)
    tl.store(device_kv + at, keys, mask=near[:, None] & in_head)
    tl.store(host_kv + host_at, keys, mask=far[:, None] & in_head)
    value_at = sequence.to(tl.int64) * v_batch_stride + head * v_head_stride + token[:, None] * v_token_stride
    values = tl.load(v + value_at + columns[None, :], mask=new[:, None] & in_head, other=0.0)
    tl.store(device_kv + device_value_offset + at, values, mask=near[:, None] & in_head)
    tl.store(host_kv + host_value_offset + host_at, values, mask=far[:, None] & in_head)


@triton.jit
def stage_slots(
    host_kv,
    staging,
    starts,
    counts,
    batch,
    kv_heads,
    device_positions,
    host_room,
    first_slot,
    staging_room,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Slots [first_slot, first_slot + staging_room) of the host side into device memory, as far as they are filled.

    For chunks of more rows than one block holds: attended to in place, every block of rows would read them again.
    """
    blocks = tl.cdiv(staging_room, SLOTS)
    columns = tl.arange(0, COLUMNS)
    for task in range(tl.program_id(0), 2 * batch * kv_heads * blocks, tl.num_programs(0)):
        slots = task % blocks * SLOTS + tl.arange(0, SLOTS)
        line = task // blocks
        sequence = line // kv_heads % batch
        start = tl.load(starts + sequence).to(tl.int32)
        count = tl.load(counts + sequence).to(tl.int32)
        filled = tl.where(count > 0, start + count - device_positions, 0)
        filled = tl.minimum(tl.minimum(filled, host_room) - first_slot, staging_room)
        mask = (slots < filled)[:, None] & (columns[None, :] < HEAD_DIM)
        offsets = slots[:, None] * HEAD_DIM + columns[None, :]
        source = host_kv + (line.to(tl.int64) * host_room + first_slot) * HEAD_DIM
        tl.store(
            staging + line.to(tl.int64) * staging_room * HEAD_DIM + offsets,
            tl.load(source + offsets, mask=mask, other=0.0),
            mask=mask,
        )
