// The code of three levels: two bits for the three most frequent exponents of a block, three more bits for the next
// seven, and a byte for any other. docs/format.md has the layout. Only packed_block.cpp includes this.
#pragma once

#include <algorithm>

#include "packed/packed_moves.h"
#include "packed/packed_planes.h"

namespace penstock {

constexpr int kFirstCodes = 3;
constexpr int kSecondCodes = 7;
constexpr int64_t kGroupCodes = 32;
constexpr int64_t kGroupBytes = 12;
constexpr int64_t kGroupsAt = 4;       // in the header: how many groups there are
constexpr int64_t kSecondTableAt = 8;  // in the header, too

// Gathers the lowest bits of eight bytes, all other bits 0, into a byte.
inline unsigned mask_of(uint64_t flags) { return (unsigned)((flags * 0x0102040810204080ull) >> 56); }

// Bits of a value's code, as encode_levels writes it: the first level's code is in bits 0 and 1, bit 3 says whether
// there is a code of the second level, bits 4 to 6 hold that code, and bit 7 says whether the exponent is an escape.
constexpr int kGoesOnBit = 3;
constexpr int kSecondBit = 4;
constexpr int kEscapedBit = 7;

inline void encode_levels(const unsigned char* exponents, const unsigned char* chosen, int used,
                          unsigned char* __restrict codes) {
  constexpr int kBoth = kFirstCodes + kSecondCodes;
  unsigned char wanted[kBoth], told[kBoth];
  for (int number = 0; number < kBoth; ++number) {
    wanted[number] = chosen[number];
    const int code = number < kFirstCodes ? number + 1 : (number - kFirstCodes + 1) << kSecondBit;
    told[number] = (unsigned char)(number < used ? code : 0);
  }
  for (int64_t i = 0; i < kTileValues; ++i) {
    unsigned char found = 0;
    for (int number = 0; number < kBoth; ++number)
      found |= (unsigned char)(exponents[i] == wanted[number] ? told[number] : 0);
    found |= (unsigned char)(found == 0 ? 1 << kEscapedBit : 0);
    found |= (unsigned char)((found & 3) == 0 ? 1 << kGoesOnBit : 0);
    codes[i] = found;
  }
}

// Packs second-level codes as encode_levels writes them, in groups of 32: bit 4a + r of a word belongs to code 8r + a.
inline void put_groups(const unsigned char* codes, int64_t groups, unsigned char* __restrict packed) {
  for (int64_t group = 0; group < groups; ++group) {
    uint64_t eights[kRounds];
    std::memcpy(eights, codes + group * kGroupCodes, sizeof eights);
    uint32_t words[3];
    for (int plane = 0; plane < 3; ++plane) {
      uint64_t bits = 0;
      for (int round = 0; round < kRounds; ++round) bits |= ((eights[round] >> (kSecondBit + plane)) & kBytes) << round;
      words[plane] = narrowed(bits);
    }
    std::memcpy(packed + group * kGroupBytes, words, sizeof words);
  }
}

// Writes all but the rests, which are there already. Returns the bytes of the block.
template <typename Moves>
int64_t pack_levels(const BlockLayout& layout, const unsigned char* exponents, const uint32_t* counts,
                           unsigned char* packed) {
  unsigned char chosen[kFirstCodes + kSecondCodes] = {};
  const int used = choose_exponents(counts, kFirstCodes + kSecondCodes, chosen);
  std::memcpy(packed + 1, chosen, kFirstCodes);
  std::memcpy(packed + kSecondTableAt + 1, chosen + kFirstCodes, kSecondCodes);
  // Room for more: eight are written at a time, and the last group is filled up.
  unsigned char seconds[kBlockRawBytes / 2 + kGroupCodes];
  unsigned char escapes[kBlockRawBytes / 2];
  int64_t second_count = 0, escape_count = 0;
  for (int64_t tile = 0; tile <= layout.tiles; ++tile) {
    const uint16_t starts[2] = {(uint16_t)second_count, (uint16_t)escape_count};
    std::memcpy(packed + kHeaderBytes + tile * 4, starts, sizeof starts);
    if (tile == layout.tiles) break;
    const unsigned char* of_tile = exponents + tile * kTileValues;
    unsigned char codes[kTileValues];
    encode_levels(of_tile, chosen, used, codes);
    uint32_t planes[2][kLanes];
    part_planes<2>(codes, planes);
    std::memcpy(packed + layout.planes_at + tile * layout.tile_planes_bytes, planes, sizeof planes);
    for (int64_t i = 0; i < kTileValues; i += 8) {
      uint64_t eight;
      std::memcpy(&eight, codes + i, sizeof eight);
      const unsigned mask = mask_of((eight >> kGoesOnBit) & kBytes);
      const uint64_t together = Moves::together(eight, mask);
      std::memcpy(seconds + second_count, &together, sizeof together);
      second_count += kMoves.counts[mask];
      // Escapes are rare.
      for (uint64_t bits = eight & (kBytes << kEscapedBit); bits; bits &= bits - 1)
        escapes[escape_count++] = of_tile[i + __builtin_ctzll(bits) / 8];
    }
  }
  std::memset(seconds + second_count, 0, kGroupCodes);
  const uint32_t groups = (uint32_t)((second_count + kGroupCodes - 1) / kGroupCodes);
  std::memcpy(packed + kGroupsAt, &groups, sizeof groups);
  put_groups(seconds, groups, packed + layout.rests_end);
  const int64_t escapes_at = layout.rests_end + groups * kGroupBytes, end = escapes_at + escape_count;
  std::memcpy(packed + escapes_at, escapes, (size_t)escape_count);
  std::memset(packed + end, 0, (size_t)(padded(end) - end));
  return padded(end);
}

// Reads a block's exponents, a tile at a time. Whatever the block contains, nothing outside of it is read.
template <typename Moves>
class LevelsReader {
 public:
  LevelsReader(const BlockLayout& layout, const unsigned char* packed, int64_t packed_bytes)
      : layout_(layout), packed_(packed), second_(packed + kSecondTableAt) {
    uint32_t groups;
    std::memcpy(&groups, packed + kGroupsAt, sizeof groups);
    groups_there_ = std::min((int64_t)groups, (packed_bytes - layout.rests_end) / kGroupBytes);
    escapes_ = packed + layout.rests_end + groups_there_ * kGroupBytes;
    escapes_there_ = packed_bytes - layout.rests_end - groups_there_ * kGroupBytes;
  }

  void read(int64_t tile, unsigned char* exponents) const {
    unsigned char codes[kTileValues];
    join_planes<2>(packed_ + layout_.planes_at + tile * layout_.tile_planes_bytes, codes);
    unsigned char masks[kTileValues / 8];
    int64_t count = 0;
    for (int64_t i = 0; i < kTileValues / 8; ++i) {
      uint64_t eight;
      std::memcpy(&eight, codes + i * 8, sizeof eight);
      masks[i] = (unsigned char)mask_of(~(eight | (eight >> 1)) & kBytes);
      count += kMoves.counts[masks[i]];
    }
    uint16_t starts[2];
    std::memcpy(starts, packed_ + kHeaderBytes + tile * 4, sizeof starts);
    // Room for more: the groups that the tile begins and ends in are whole here, and eight are read at a time.
    unsigned char seconds[kTileValues + 2 * kGroupCodes + 8];
    read_seconds(starts[0], starts[0] + count, starts[1], seconds);
    first_exponents(codes, exponents);
    const unsigned char* next = seconds + starts[0] % kGroupCodes;
    for (int64_t i = 0; i < kTileValues / 8; ++i) {
      uint64_t eight, of_second;
      std::memcpy(&eight, exponents + i * 8, sizeof eight);
      std::memcpy(&of_second, next, sizeof of_second);
      eight |= Moves::apart(of_second, masks[i]);
      std::memcpy(exponents + i * 8, &eight, sizeof eight);
      next += kMoves.counts[masks[i]];
    }
  }

 private:
  // Exponents of the values that have a first-level code; 0 for the others.
  void first_exponents(const unsigned char* codes, unsigned char* __restrict exponents) const {
    const unsigned char one = packed_[1], two = packed_[2], three = packed_[3];
    for (int64_t i = 0; i < kTileValues; ++i)
      exponents[i] =
          (unsigned char)((codes[i] == 1 ? one : 0) | (codes[i] == 2 ? two : 0) | (codes[i] == 3 ? three : 0));
  }

  // Exponents of second-level codes [begin, end), from the beginning of their first group on.
  void read_seconds(int64_t begin, int64_t end, int64_t escape, unsigned char* exponents) const {
    const int64_t first = begin / kGroupCodes;
    for (int64_t group = first; group * kGroupCodes < end; ++group) {
      unsigned char* of_group = exponents + (group - first) * kGroupCodes;
      uint32_t words[3] = {};
      if (group < groups_there_) std::memcpy(words, packed_ + layout_.rests_end + group * kGroupBytes, sizeof words);
      for (int round = 0; round < kRounds; ++round) {
        const uint32_t codes = ((words[0] >> round) & kNibbles) | (((words[1] >> round) & kNibbles) << 1) |
                               (((words[2] >> round) & kNibbles) << 2);
        second_.look_up(codes, of_group + round * 8);
      }
      const uint32_t escaped = ~(words[0] | words[1] | words[2]);
      if (!escaped) continue;
      for (int round = 0; round < kRounds; ++round)
        for (uint32_t bits = (escaped >> round) & kNibbles; bits; bits &= bits - 1) {
          const int64_t at = round * 8 + __builtin_ctz(bits) / 4, code = group * kGroupCodes + at;
          if (code < begin || code >= end) continue;
          of_group[at] = escape < escapes_there_ ? escapes_[escape] : 0;
          escape++;
        }
    }
  }

  const BlockLayout& layout_;
  const unsigned char* packed_;
  ExponentPairs second_;
  int64_t groups_there_;
  const unsigned char* escapes_;
  int64_t escapes_there_;
};

}  // namespace penstock
