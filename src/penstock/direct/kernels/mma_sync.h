// The functions of wgmma.h with the same meaning, on mma.sync: GPUs that are newer than Hopper have no wgmma.
//
// Descriptors and the accumulators' places are those of wgmma.h, so the kernel around it is one text. There a warpgroup
// multiplies 64 rows at once; here each of its four warps takes its own 16 rows, 8 tokens at a time. Of a descriptor
// only the address is needed: what else it says (128-byte swizzle, rows of 128 bytes, K contiguous) is fixed here.
#pragma once

#include "descriptor.h"

namespace penstock {

// Each lane has waited for the slots by itself, and the instructions that follow want the warp together.
DEVICE void fence_products() { sync_warp(); }

// Nothing is at work behind an instruction that has ended.
DEVICE void commit_products() {}
DEVICE void settle_products(float (&)[TILE_TOKENS / 2]) {}

// Between the reads of a slot and the arrival that gives it back. The reads are loads of this warp's lanes, and neither
// compiler moves them behind the arrival: in the text they are volatile and clobber memory, as it does, and to the
// assembler the arrival is a release, which no earlier load of its lane may pass. The meeting puts the loads of all
// other lanes before that lane's arrival too. So who has seen it in this CTA, and copies into the slot then, writes
// behind all of them. A peer counts on the products that stand in between: they were not begun before their operands
// had come (arrive_at says what the memory model makes of that). No proxy fence: that is for writes which the copy
// engine is to see, and nobody here writes into a slot.
template <int>
DEVICE void await_products() {
  sync_warp();
}

// Where a lane finds its 16 bytes of an operand: of this row, the first or the second 8 of the 16 columns that the
// descriptor starts at. Address bits 4-6 are xored with bits 7-9, the row within its eight, as the copy engine wrote.
// A descriptor has the 18 bits of an address that lie within a CTA's memory; the bits above them say which CTA of the
// cluster, and without them all would read the first one's.
DEVICE u32 lane_address(u64 descriptor, u32 row, u32 half) {
  const u32 own = shared_base() & ~0x3ffffu;
  const u32 straight = own + ((u32)(descriptor & 0x3fff) << 4) + row * 128 + half * 16;
  return straight ^ ((straight >> 3) & 0x70);
}

DEVICE void multiply(float (&d)[TILE_TOKENS / 2], u64 a, u64 b, u32 add) {
  static_assert(TILE_TOKENS == 8 || TILE_TOKENS % 16 == 0, "tokens come in eights, and are loaded sixteen at a time");
  const u32 warp = thread_index() / 32 % 4;
  const u32 lane = lane_index();
  // Four matrices of 8x8: rows 0-7 and rows 8-15 of the first 8 columns, then of the second.
  Words4 rows;
  load_matrices(lane_address(a, 16 * warp + lane % 16, lane / 16), rows.word[0], rows.word[1], rows.word[2],
                rows.word[3]);
  if (!add) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 2; ++i) d[i] = 0;
  }
#if TILE_TOKENS == 8
  u32 low, high;
  load_matrices(lane_address(b, lane % 8, lane / 8 % 2), low, high);
  multiply_16x8x16(d[0], d[1], d[2], d[3], rows, low, high);
#else
  // Both halves of the columns of 8 tokens, then of the next 8. Blocks of tokens are whole periods of the swizzle.
  const u32 tokens = lane_address(b, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; i += 8) {
    u32 low, high, next_low, next_high;
    load_matrices(tokens + i * 2 * 128, low, high, next_low, next_high);
    multiply_16x8x16(d[i], d[i + 1], d[i + 2], d[i + 3], rows, low, high);
    multiply_16x8x16(d[i + 4], d[i + 5], d[i + 6], d[i + 7], rows, next_low, next_high);
  }
#endif
}

}  // namespace penstock
