// What the codes of packed blocks share: where the bits of a tile's value are, and how exponents are chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "packed/packed_block.h"

namespace penstock {

constexpr int64_t kHeaderBytes = 16;
constexpr int kLanes = 32;
constexpr int kRounds = 4;
constexpr int64_t kPlaneBytes = kLanes * 4;
// The lowest bit of each nibble.
constexpr uint32_t kNibbles = 0x11111111u;
// And of each byte.
constexpr uint64_t kBytes = 0x0101010101010101ull;

inline int64_t padded(int64_t bytes) { return (bytes + kPackedUnitBytes - 1) / kPackedUnitBytes * kPackedUnitBytes; }

// A value's place: each lane has eight values at a time, in four rounds. Value `at` of a round has bit 4 * at + round
// of the lane's word in each plane, so that three planes make eight selectors of four bits.
constexpr int64_t value_index(int lane, int round, int at) { return round * 256 + lane * 8 + at; }

// Narrows eight codes from a byte each to four bits each.
inline uint32_t narrowed(uint64_t codes) {
  codes = (codes | (codes >> 4)) & 0x00FF00FF00FF00FFull;
  codes = (codes | (codes >> 8)) & 0x0000FFFF0000FFFFull;
  return (uint32_t)(codes | (codes >> 16));
}

// And back.
inline uint64_t widened(uint32_t codes) {
  uint64_t wide = codes;
  wide = (wide | (wide << 16)) & 0x0000FFFF0000FFFFull;
  wide = (wide | (wide << 8)) & 0x00FF00FF00FF00FFull;
  return (wide | (wide << 4)) & 0x0F0F0F0F0F0F0F0Full;
}

// Splits codes, or other bits of the values, into planes: a plane's word holds one bit of each of the lane's values.
template <int kCount>
void part_planes(const unsigned char* codes, uint32_t (*planes)[kLanes]) {
  uint64_t eights[kRounds][kLanes];
  static_assert(sizeof eights == kTileValues, "eight values for each lane, in each round");
  std::memcpy(eights, codes, sizeof eights);
  for (int plane = 0; plane < kCount; ++plane)
    for (int lane = 0; lane < kLanes; ++lane) {
      uint64_t bits = 0;
      for (int round = 0; round < kRounds; ++round) bits |= ((eights[round][lane] >> plane) & kBytes) << round;
      planes[plane][lane] = narrowed(bits);
    }
}

// The inverse: one byte for each value.
template <int kCount>
void join_planes(const unsigned char* planes, unsigned char* bits) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t words[kCount];
    for (int plane = 0; plane < kCount; ++plane) std::memcpy(&words[plane], planes + plane * kPlaneBytes + lane * 4, 4);
    for (int round = 0; round < kRounds; ++round) {
      uint32_t nibbles = 0;
      for (int plane = 0; plane < kCount; ++plane) nibbles |= ((words[plane] >> round) & kNibbles) << plane;
      const uint64_t eight = widened(nibbles);
      std::memcpy(bits + value_index(lane, round, 0), &eight, sizeof eight);
    }
  }
}

// Picks the most frequent exponents, the smaller in a tie. Unused entries stay as they are. Returns how many there are.
inline int choose_exponents(const uint32_t* counts, int most, unsigned char* chosen) {
  bool taken[256] = {};
  for (int number = 0; number < most; ++number) {
    int best = -1;
    for (int e = 0; e < 256; ++e)
      if (!taken[e] && counts[e] && (best < 0 || counts[e] > counts[best])) best = e;
    if (best < 0) return number;
    taken[best] = true;
    chosen[number] = (unsigned char)best;
  }
  return most;
}

// Looks up two exponents at a time, by two codes of four bits each.
struct ExponentPairs {
  explicit ExponentPairs(const unsigned char* table) {
    for (int codes = 0; codes < 128; ++codes) {
      const unsigned char pair[2] = {table[codes & 7], table[codes >> 4]};
      std::memcpy(&pairs[codes], pair, sizeof pair);
    }
  }
  // The exponents of eight codes of four bits each. The highest bit of each is clear: codes go up to seven.
  void look_up(uint32_t codes, unsigned char* exponents) const {
    for (int at = 0; at < 8; at += 2, codes >>= 8) std::memcpy(exponents + at, &pairs[codes & 0xFF], 2);
  }
  uint16_t pairs[128];
};

}  // namespace penstock
