# mypy: ignore-errors
"""Attention over a split KV cache, in Triton: its language is not Python's, so types are not checked here.

A partial result is attention over one range of slots of one side: its output, and the base-2 logarithm of what that was
divided by. Partial results of both sides lie in one workspace and are merged in a fixed order. No two programs write to
one place and nothing is added atomically, so the same inputs give the same bits.

A loaded slot always lies below the sequence's length: what is beyond it, NaN included, reaches nothing.
"""

import triton
import triton.language as tl

# Slots: what a range is a multiple of. Less than a tile, or much of a short side would be with few programs.
SHARE_GRAIN = tl.constexpr(16)


@triton.jit
def _attend_slots(
    query,
    reach,
    keys,
    values,
    first_position,
    begin,
    end,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of a block of rows over slots [begin, end) of one side, online, in fp32."""
    columns = tl.arange(0, COLUMNS)
    in_head = columns[None, :] < HEAD_DIM
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(begin, end, SLOTS):
        slots = first + tl.arange(0, SLOTS)
        inside = slots < end
        offsets = slots[:, None] * HEAD_DIM + columns[None, :]
        key = tl.load(keys + offsets, mask=inside[:, None] & in_head, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale_log2
        visible = inside[None, :] & (first_position + slots[None, :] <= reach[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has -inf as its maximum, and -inf less -inf is NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(shares, 1)
        value = tl.load(values + offsets, mask=inside[:, None] & in_head, other=0.0)
        shares = shares.to(value.dtype)
        if UPCAST:
            shares = shares.to(tl.float32)
            value = value.to(tl.float32)
        summed = summed * fade[:, None] + tl.dot(shares, value, input_precision="tf32x3")
        top = higher
    return summed, top, total


@triton.jit
def _partial(
    task,
    q,
    side_kv,
    starts,
    counts,
    partial_out,
    partial_log,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    batch,
    kv_heads,
    tokens,
    first_position,
    side_positions,
    line_stride,
    value_offset,
    splits,
    first_split,
    row_blocks,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One task: one range of one side, for one block of rows of one kv head of one sequence.

    A row is one query head of the group with one token: all of them use the same keys, which are thus read once.
    `side_positions` are those that lie on this side from `first_position` on. Keys of one head of one sequence (a line)
    begin `line_stride` elements after those of the one before, and their values `value_offset` elements later.
    """
    # Splits go last: those of a short sequence that have nothing to do fall to all programs alike.
    row_block = task % row_blocks
    head = (task // row_blocks) % kv_heads
    sequence = (task // (row_blocks * kv_heads)) % batch
    split = task // (row_blocks * kv_heads * batch)
    start = tl.load(starts + sequence).to(tl.int32)
    count = tl.load(counts + sequence).to(tl.int32)

    rows = row_block * ROWS + tl.arange(0, ROWS)
    token = rows // GROUP
    used = (rows < tokens * GROUP) & (token < count)
    # No row of this block reaches further than its last token does.
    last_token = tl.minimum(count, ((row_block + 1) * ROWS - 1) // GROUP + 1)
    seen = tl.minimum(start + last_token - first_position, side_positions)
    seen = tl.where((row_block * ROWS) // GROUP < count, tl.maximum(seen, 0), 0)
    # Equal shares of what there is now, not of what there is room for: every program has work at every length.
    share = tl.cdiv(tl.cdiv(seen, splits), SHARE_GRAIN) * SHARE_GRAIN
    begin = tl.minimum(split * share, seen)
    end = tl.minimum(begin + share, seen)

    columns = tl.arange(0, COLUMNS)
    in_head = columns[None, :] < HEAD_DIM
    at = sequence.to(tl.int64) * q_batch_stride + (head * GROUP + rows % GROUP)[:, None] * q_head_stride
    at += token[:, None] * q_token_stride + columns[None, :]
    query = tl.load(q + at, mask=used[:, None] & in_head & (begin < end), other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    # 64 bits: a cache may have more elements than 32 bits count.
    keys = side_kv + (sequence * kv_heads + head).to(tl.int64) * line_stride
    values = keys + value_offset
    summed, top, total = _attend_slots(
        query, start + token, keys, values, first_position, begin, end, scale_log2,
        HEAD_DIM, ROWS, SLOTS, COLUMNS, UPCAST,
    )  # fmt: skip

    some = total > 0
    # NaN in what was read stays NaN: it is not "nothing seen".
    some = some | (total != total)
    divisor = tl.where(some, total, 1.0)
    place = (((first_split + split) * batch + sequence) * kv_heads + head).to(tl.int64) * tokens * GROUP + rows
    inside = rows < tokens * GROUP
    tl.store(partial_log + place, tl.where(some, top + tl.log2(divisor), float("-inf")), mask=inside)
    tl.store(
        partial_out + place[:, None] * HEAD_DIM + columns[None, :],
        summed / divisor[:, None],
        mask=(inside & some)[:, None] & in_head,
    )


@triton.jit
def attend_partials(
    q,
    device_kv,
    host_kv,
    starts,
    counts,
    partial_out,
    partial_log,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    batch,
    kv_heads,
    tokens,
    device_first,
    device_positions,
    device_line_stride,
    device_value_offset,
    host_positions,
    host_line_stride,
    host_value_offset,
    device_splits,
    host_splits,
    first_split,
    host_programs,
    row_blocks,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Both sides in one launch. The first `host_programs` programs face the host and share all of its tasks, so that no
    more than those read over the link at a time; they come first, because the link takes longest."""
    program = tl.program_id(0)
    if program < host_programs:
        for task in range(program, batch * kv_heads * row_blocks * host_splits, host_programs):
            _partial(
                task, q, host_kv, starts, counts, partial_out, partial_log,
                q_batch_stride, q_head_stride, q_token_stride, batch, kv_heads, tokens,
                device_first + device_positions, host_positions, host_line_stride, host_value_offset,
                host_splits, first_split + device_splits, row_blocks, scale_log2,
                GROUP, HEAD_DIM, ROWS, SLOTS, COLUMNS, UPCAST,
            )  # fmt: skip
    else:
        _partial(
            program - host_programs, q, device_kv, starts, counts, partial_out, partial_log,
            q_batch_stride, q_head_stride, q_token_stride, batch, kv_heads, tokens,
            device_first, device_positions, device_line_stride, device_value_offset,
            device_splits, first_split, row_blocks, scale_log2,
            GROUP, HEAD_DIM, ROWS, SLOTS, COLUMNS, UPCAST,
        )  # fmt: skip


@triton.jit
def merge_partials(
    partial_out,
    partial_log,
    out,
    starts,
    counts,
    rows,
    kv_heads,
    tokens,
    splits,
    capacity,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A few rows of the output: of each, the mean of its partial results, weighted by two to their logarithms."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    per_head = tokens * GROUP
    token = (row % per_head) // GROUP
    head = row // per_head % kv_heads
    sequence = row // (per_head * kv_heads)
    count = tl.load(counts + sequence, mask=inside, other=0).to(tl.int32)
    length = tl.load(starts + sequence, mask=inside, other=0).to(tl.int32) + count

    top = tl.full([ROWS, SPLITS], float("-inf"), tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        there = inside[:, None] & (split < splits)[None, :]
        place = split.to(tl.int64)[None, :] * rows + row[:, None]
        top = tl.maximum(top, tl.load(partial_log + place, mask=there, other=float("-inf")))
    highest = tl.max(top, 1)
    shift = tl.where(highest == float("-inf"), 0.0, highest)

    columns = tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        there = inside[:, None] & (split < splits)[None, :]
        place = split.to(tl.int64)[None, :] * rows + row[:, None]
        logs = tl.load(partial_log + place, mask=there, other=float("-inf"))
        weights = tl.exp2(logs - shift[:, None])
        # Where nothing was seen nothing was stored: that memory holds anything.
        stored = (logs != float("-inf"))[:, :, None] & in_head[None, None, :]
        parts = tl.load(partial_out + place[:, :, None] * HEAD_DIM + columns[None, None, :], mask=stored, other=0.0)
        summed += tl.sum(weights[:, :, None] * parts, 1)
        total += tl.sum(weights, 1)
    merged = summed / tl.where(total == 0, 1.0, total)[:, None]
    merged = tl.where((token < count)[:, None], merged, 0.0)
    merged = tl.where((length <= capacity)[:, None], merged, float("nan"))
    at = ((sequence * kv_heads + head).to(tl.int64) * GROUP + row % GROUP) * tokens + token
    tl.store(
        out + at[:, None] * HEAD_DIM + columns[None, :],
        merged.to(out.dtype.element_ty),
        mask=inside[:, None] & in_head[None, :],
    )
