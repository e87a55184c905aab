// How the tensor cores are told where a tile lies: plain arithmetic, also in the tests.
#pragma once

#include "split_schedule.h"

namespace penstock {

// A tile of rows of 128 bytes (64 columns of two bytes), swizzled, K contiguous, as 64 bits.
//   bits  0-13  address / 16
//   bits 16-29  leading byte offset / 16: not used by swizzled layouts with K contiguous; 1 by custom
//   bits 32-45  stride byte offset / 16, from 8 rows to the next 8: 8 * 128 bytes
//   bits 49-51  base offset: 0, because tiles start at a multiple of 1024
//   bits 62-63  1: the 128-byte swizzle
PENSTOCK_BOTH u64 describe(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | ((u64)(8 * 128 >> 4) << 32) | (1ull << 62);
}

// The swizzle is a function of the address (bits 4-6 xored with bits 7-9), so the next 16 columns within the 128 bytes
// are a later start address: 32 bytes, 2 in units of 16.
constexpr u64 kStepOf16Columns = 2;

}  // namespace penstock
