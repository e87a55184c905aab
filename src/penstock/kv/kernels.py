# mypy: ignore-errors
"""Attention over a split KV cache, in Triton: its language is not Python's, so types are not checked here.

A part is a fixed set of positions of a sequence, tile by tile. The sequence's length and the shapes decide which ones.
One program sums over a part. Its result is the values, the sum of their weights, and the highest score. The results are
merged in the order of the parts. Where a tile lies decides only its address and which program loads it. Both sides run
the same code, compiled once for all splits, so the bits are the same wherever the sides meet. No two programs write to
the same place, and nothing is added atomically.

A loaded slot always lies below the sequence's length: what lies beyond it, NaN included, has no effect.
"""

import triton
import triton.language as tl

# Numbers that vary with the split, not specialized: Triton would compile another kernel for 1 or a multiple of 16.
SPLIT_NUMBERS = [
    "device_positions",
    "far_first",
    "far_positions",
    "first_position",
    "end_position",
    "host_programs",
]


@triton.jit
def _attend_part(
    q,
    device_kv,
    far_kv,
    part_out,
    part_top,
    part_total,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    batch,
    kv_heads,
    tokens,
    device_positions,
    far_first,
    far_positions,
    sequence,
    head,
    row_block,
    part,
    start,
    count,
    begin,
    end,
    step,
    carried,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
    CARRIES: tl.constexpr,
):
    """Attention of a block of rows of one kv head of one sequence over tiles from `begin` to `end`, online, in fp32.

    A row is one query head of the group with one token: all of them use the same keys, which are thus read once.
    `carried`: the part goes on from what an earlier launch has left of it; if CARRIES, as for chunks.
    """
    rows = row_block * ROWS + tl.arange(0, ROWS)
    token = rows // GROUP
    inside = rows < tokens * GROUP
    used = inside & (token < count)
    columns = tl.arange(0, COLUMNS)
    in_head = columns[None, :] < HEAD_DIM
    at = tl.cast(sequence, tl.int64) * q_batch_stride + (head * GROUP + rows % GROUP)[:, None] * q_head_stride
    at += token[:, None] * q_token_stride + columns[None, :]
    query = tl.load(q + at, mask=used[:, None] & in_head & (begin < end), other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    reach = start + token

    # 64 bits once, and 32 for what differs from row to row: addresses are many registers.
    place = tl.cast((part * batch + sequence) * kv_heads + head, tl.int64) * tokens * GROUP
    out_at = rows[:, None] * HEAD_DIM + columns[None, :]
    if CARRIES:
        top = tl.load(part_top + place + rows, mask=inside & carried, other=float("-inf"))
        total = tl.load(part_total + place + rows, mask=inside & carried, other=0.0)
        # Where nothing was seen nothing was stored: that memory holds anything.
        stored = (inside & carried & (total != 0))[:, None] & in_head
        summed = tl.load(part_out + place * HEAD_DIM + out_at, mask=stored, other=0.0)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, COLUMNS], tl.float32)

    # 64 bits: a cache may have more elements than 32 bits count. Strides are written as multiples of HEAD_DIM, which
    # tells the compiler that rows of 16 bytes are aligned.
    line = tl.cast(sequence * kv_heads + head, tl.int64)
    lines = tl.cast(batch * kv_heads, tl.int64)
    near_keys = device_kv + line * device_positions * HEAD_DIM
    far_keys = far_kv + (line * far_positions - far_first) * HEAD_DIM
    near_values = lines * device_positions * HEAD_DIM
    far_values = lines * far_positions * HEAD_DIM
    for first in range(begin, end, step):
        # Sides meet on the border of a block, and so of a tile.
        near = first < device_positions
        keys = tl.where(near, near_keys, far_keys)
        values = keys + tl.where(near, near_values, far_values)
        slots = first + tl.arange(0, SLOTS)
        loaded = slots < end
        offsets = slots[:, None] * HEAD_DIM + columns[None, :]
        key = tl.load(keys + offsets, mask=loaded[:, None] & in_head, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale_log2
        scores = tl.where(loaded[None, :] & (slots[None, :] <= reach[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has -inf as its maximum, and -inf less -inf is NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(shares, 1)
        value = tl.load(values + offsets, mask=loaded[:, None] & in_head, other=0.0)
        shares = shares.to(value.dtype)
        if UPCAST:
            shares = shares.to(tl.float32)
            value = value.to(tl.float32)
        summed = summed * fade[:, None] + tl.dot(shares, value, input_precision="tf32x3")
        top = higher

    tl.store(part_top + place + rows, top, mask=inside)
    tl.store(part_total + place + rows, total, mask=inside)
    # NaN in what was read stays NaN: it is not "nothing seen".
    tl.store(part_out + place * HEAD_DIM + out_at, summed, mask=(inside & (total != 0))[:, None] & in_head)


@triton.jit(do_not_specialize=SPLIT_NUMBERS)
def attend_parts(
    q,
    device_kv,
    far_kv,
    starts,
    counts,
    part_out,
    part_top,
    part_total,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    batch,
    kv_heads,
    tokens,
    capacity,
    device_positions,
    far_first,
    far_positions,
    first_position,
    end_position,
    parts,
    host_programs,
    row_blocks,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Positions [first_position, end_position) of every sequence: those of the device, and `far_positions` from
    `far_first` on, which lie on the host or are staged.

    Parts are runs of blocks, about equally long at every length: every program has work. The first `host_programs`
    programs share those that reach into the far side, so that no more than these read over the link at a time; they
    come first, because the link takes longest. Of the other programs each does one part of one block of rows.

    INTERLEAVED, for chunks of several blocks of rows: tile t belongs to part t % parts, so that each launch over a
    piece of the far side has work for all; what is far has been staged, and no program faces the host.
    """
    program = tl.program_id(0)
    facing = program < host_programs
    # Parts go last: those of a short sequence that have nothing to do fall to all programs alike.
    task = tl.maximum(program - host_programs, 0)
    row_block = task % row_blocks
    own_head = (task // row_blocks) % kv_heads
    own_sequence = (task // (row_blocks * kv_heads)) % batch
    own_part = task // (row_blocks * kv_heads * batch)
    dealt = 0
    for sequence in range(tl.where(facing, 0, own_sequence), tl.where(facing, batch, own_sequence + 1)):
        start = tl.load(starts + sequence).to(tl.int32)
        count = tl.load(counts + sequence).to(tl.int32)
        # No row of this block reaches further than its last token does.
        last_token = tl.minimum(count, ((row_block + 1) * ROWS - 1) // GROUP + 1)
        seen = tl.where((row_block * ROWS) // GROUP < count, tl.minimum(start + last_token, capacity), 0)
        # Equal shares of what there is now, not of what there is room for.
        share = tl.maximum(tl.cdiv(tl.cdiv(seen, parts), BLOCK), 1) * BLOCK
        if INTERLEAVED:
            used_parts = 0
            near_parts = 0
        else:
            used_parts = tl.cdiv(seen, share)
            near_parts = tl.where(seen <= device_positions, used_parts, device_positions // share)
        # Dealt out one by one, over all sequences.
        turn = tl.maximum(host_programs, 1)
        offset = (program + turn - dealt % turn) % turn
        dealt += (used_parts - near_parts) * kv_heads
        is_own = (own_part < near_parts) | (own_part >= used_parts)
        first_task = tl.where(facing, near_parts * kv_heads + offset, own_part * kv_heads + own_head)
        end_task = tl.where(facing, used_parts * kv_heads, tl.where(is_own, first_task + 1, first_task))
        for one in range(first_task, end_task, tl.where(facing, host_programs, 1)):
            part = one // kv_heads
            if INTERLEAVED:
                tile = first_position // SLOTS
                begin = (tile + (part + parts - tile % parts) % parts) * SLOTS
                end = tl.minimum(seen, end_position)
                step = parts * SLOTS
            else:
                begin = tl.minimum(part * share, seen)
                end = tl.minimum(begin + share, seen)
                step = SLOTS
            _attend_part(
                q, device_kv, far_kv, part_out, part_top, part_total,
                q_batch_stride, q_head_stride, q_token_stride, batch, kv_heads, tokens,
                device_positions, far_first, far_positions,
                sequence, one % kv_heads, row_block, part, start, count, begin, end, step, first_position > 0,
                scale_log2,
                GROUP, HEAD_DIM, ROWS, SLOTS, COLUMNS, UPCAST, INTERLEAVED,
            )  # fmt: skip


@triton.jit
def merge_parts(
    part_out,
    part_top,
    part_total,
    out,
    starts,
    counts,
    rows,
    kv_heads,
    tokens,
    parts,
    capacity,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A few rows of the output: of each, what its parts have summed, scaled to one highest score and divided once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    per_head = tokens * GROUP
    token = (row % per_head) // GROUP
    head = row // per_head % kv_heads
    sequence = row // (per_head * kv_heads)
    count = tl.load(counts + sequence, mask=inside, other=0).to(tl.int32)
    length = tl.load(starts + sequence, mask=inside, other=0).to(tl.int32) + count

    top = tl.full([ROWS, PARTS], float("-inf"), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = inside[:, None] & (part < parts)[None, :]
        place = part.to(tl.int64)[None, :] * rows + row[:, None]
        top = tl.maximum(top, tl.load(part_top + place, mask=there, other=float("-inf")))
    highest = tl.max(top, 1)
    shift = tl.where(highest == float("-inf"), 0.0, highest)

    columns = tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = inside[:, None] & (part < parts)[None, :]
        place = part.to(tl.int64)[None, :] * rows + row[:, None]
        weights = tl.exp2(tl.load(part_top + place, mask=there, other=float("-inf")) - shift[:, None])
        totals = tl.load(part_total + place, mask=there, other=0.0)
        # Where nothing was seen nothing was stored: that memory holds anything.
        stored = (totals != 0)[:, :, None] & in_head[None, None, :]
        found = tl.load(part_out + place[:, :, None] * HEAD_DIM + columns[None, None, :], mask=stored, other=0.0)
        summed += tl.sum(weights[:, :, None] * found, 1)
        total += tl.sum(weights * totals, 1)
    merged = summed / tl.where(total == 0, 1.0, total)[:, None]
    merged = tl.where((token < count)[:, None], merged, 0.0)
    merged = tl.where((length <= capacity)[:, None], merged, float("nan"))
    at = ((sequence * kv_heads + head).to(tl.int64) * GROUP + row % GROUP) * tokens + token
    tl.store(
        out + at[:, None] * HEAD_DIM + columns[None, :],
        merged.to(out.dtype.element_ty),
        mask=inside[:, None] & in_head[None, :],
    )
