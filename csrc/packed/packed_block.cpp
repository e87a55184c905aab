// Loops over the values of a tile are worth vectorizing, which -O2 seldom does.
#pragma GCC optimize("O3")

#include "packed/packed_block.h"

#include <algorithm>
#include <cstring>

#include "packed/packed_float.h"
#include "packed/packed_levels.h"
#include "packed/packed_planes.h"

namespace penstock {
namespace {

constexpr int kCodes = 7;
constexpr int64_t kTableBytes = 8;
constexpr int kPlanes = 3;

bool has_levels(PackedKind kind) { return kind == PackedKind::bfloat16_levels; }

// The code of each exponent of a tile, 0 for an escape. Comparing whole vectors seven times beats one lookup per value.
void encode_tile(const unsigned char* exponents, const unsigned char* table, int used, unsigned char* __restrict codes) {
  unsigned char wanted[kCodes + 1], told[kCodes + 1];
  for (int code = 1; code <= kCodes; ++code) {
    wanted[code] = table[code];
    told[code] = (unsigned char)(code <= used ? code : 0);
  }
  for (int64_t i = 0; i < kTileValues; ++i) {
    unsigned char found = 0;
    for (int code = 1; code <= kCodes; ++code) found |= (unsigned char)(exponents[i] == wanted[code] ? told[code] : 0);
    codes[i] = found;
  }
}

// Separates and counts the exponents, and writes the rests where they belong.
template <typename Float>
void part_values(const BlockLayout& layout, const unsigned char* raw, unsigned char* packed, unsigned char* exponents,
                 uint32_t* counts_of_all) {
  using Word = typename Float::Word;
  // Eight counters each, so that equal exponents in a row do not wait for one another. Half of the values are enough.
  uint32_t counts[8][256] = {};
  for (int64_t tile = 0; tile < layout.tiles; ++tile) {
    const int64_t begin = tile * kTileValues, count = layout.values - begin;
    const unsigned char* values = raw + begin * (int64_t)sizeof(Word);
    Word filled_up[kTileValues];
    if (count < kTileValues) {
      // Missing values repeat the last one.
      std::memcpy(filled_up, values, (size_t)count * sizeof(Word));
      std::fill(filled_up + count, filled_up + kTileValues, filled_up[count - 1]);
      values = reinterpret_cast<unsigned char*>(filled_up);
    }
    unsigned char bits[Float::kRestPlanes ? kTileValues : 1];
    Float::part(reinterpret_cast<const typename Float::Stored*>(values), exponents + begin,
                packed + layout.rests_at + begin * Float::kRestBytes, bits);
    if constexpr (Float::kRestPlanes != 0) {
      uint32_t planes[Float::kRestPlanes][kLanes];
      part_planes<Float::kRestPlanes>(bits, planes);
      const int64_t planes_at = layout.planes_at + tile * layout.tile_planes_bytes + kPlanes * kPlaneBytes;
      std::memcpy(packed + planes_at, planes, sizeof planes);
    }
    for (int64_t i = 0; i < kTileValues; i += 16)
      for (int64_t k = 0; k < 4; ++k) {
        counts[k][exponents[begin + i + k]]++;
        counts[4 + k][exponents[begin + i + 8 + k]]++;
      }
  }
  for (int e = 0; e < 256; ++e) {
    counts_of_all[e] = 0;
    for (int k = 0; k < 8; ++k) counts_of_all[e] += counts[k][e];
  }
}

// Packs in the code of seven exponents. Returns the bytes of the block.
inline int64_t pack_codes(const BlockLayout& layout, const unsigned char* exponents, const uint32_t* counts,
                          unsigned char* packed) {
  const int used = choose_exponents(counts, kCodes, packed + 1);
  unsigned char* escapes = packed + layout.rests_end;
  uint32_t escape_count = 0;
  for (int64_t tile = 0; tile < layout.tiles; ++tile) {
    const uint16_t first_escape = (uint16_t)escape_count;
    std::memcpy(packed + kHeaderBytes + tile * 2, &first_escape, sizeof first_escape);
    const unsigned char* of_tile = exponents + tile * kTileValues;
    unsigned char codes[kTileValues];
    encode_tile(of_tile, packed, used, codes);
    uint32_t planes[kPlanes][kLanes];
    part_planes<kPlanes>(codes, planes);
    std::memcpy(packed + layout.planes_at + tile * layout.tile_planes_bytes, planes, sizeof planes);
    uint32_t escaped[kLanes], lanes = 0;
    for (int lane = 0; lane < kLanes; ++lane) escaped[lane] = ~(planes[0][lane] | planes[1][lane] | planes[2][lane]);
    for (int lane = 0; lane < kLanes; ++lane) lanes |= (uint32_t)(escaped[lane] != 0) << lane;
    // Most lanes have no escapes: a branch per lane would be mispredicted for each lane that has some.
    for (; lanes; lanes &= lanes - 1)
      for (uint32_t lane = (uint32_t)__builtin_ctz(lanes), bits = escaped[lane]; bits; bits &= bits - 1) {
        int bit = __builtin_ctz(bits);
        escapes[escape_count++] = of_tile[value_index((int)lane, bit % kRounds, bit / kRounds)];
      }
  }
  std::memcpy(packed + kTableBytes, &escape_count, sizeof escape_count);
  int64_t bytes = padded(layout.rests_end + escape_count);
  std::memset(escapes + escape_count, 0, (size_t)(bytes - layout.rests_end - escape_count));
  return bytes;
}

template <typename Float, typename Moves>
int64_t pack(PackedKind kind, const unsigned char* raw, int64_t raw_bytes, unsigned char* packed) {
  const BlockLayout layout(kind, raw_bytes);
  std::memset(packed, 0, (size_t)layout.planes_at);
  unsigned char exponents[kBlockRawBytes / (int64_t)sizeof(typename Float::Word)];
  uint32_t counts[256];
  part_values<Float>(layout, raw, packed, exponents, counts);
  return has_levels(kind) ? pack_levels<Moves>(layout, exponents, counts, packed)
                          : pack_codes(layout, exponents, counts, packed);
}

// Reads the exponents of a tile, in the code of seven.
inline void read_codes(const BlockLayout& layout, const unsigned char* packed, int64_t packed_bytes, int64_t tile,
                       const ExponentPairs& table, unsigned char* exponents) {
  const unsigned char* escapes = packed + layout.rests_end;
  const int64_t escapes_there = packed_bytes - layout.rests_end;
  uint16_t first_escape;
  std::memcpy(&first_escape, packed + kHeaderBytes + tile * 2, sizeof first_escape);
  int64_t escape = first_escape;
  const unsigned char* of_tile = packed + layout.planes_at + tile * layout.tile_planes_bytes;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t planes[kPlanes];
    for (int plane = 0; plane < kPlanes; ++plane)
      std::memcpy(&planes[plane], of_tile + plane * kPlaneBytes + lane * 4, 4);
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t codes = ((planes[0] >> round) & kNibbles) | (((planes[1] >> round) & kNibbles) << 1) |
                             (((planes[2] >> round) & kNibbles) << 2);
      table.look_up(codes, exponents + value_index(lane, round, 0));
    }
    for (uint32_t bits = ~(planes[0] | planes[1] | planes[2]); bits; bits &= bits - 1) {
      int bit = __builtin_ctz(bits);
      // Damaged bytes may ask for more than there are.
      exponents[value_index(lane, bit % kRounds, bit / kRounds)] = escape < escapes_there ? escapes[escape] : 0;
      escape++;
    }
  }
}

// Calls read(tile, exponents) for the wanted tiles, and joins the exponents with the rests.
template <typename Float, typename Read>
void unpack_tiles(const BlockLayout& layout, const unsigned char* packed, int64_t begin, int64_t end, unsigned char* out,
                  Read read) {
  constexpr int64_t kTileBytes = kTileValues * (int64_t)sizeof(typename Float::Word);
  typename Float::Word values[kTileValues];
  for (int64_t tile = begin / kTileBytes; tile * kTileBytes < end; ++tile) {
    unsigned char exponents[kTileValues];
    read(tile, exponents);
    unsigned char bits[Float::kRestPlanes ? kTileValues : 1];
    if constexpr (Float::kRestPlanes != 0)
      join_planes<Float::kRestPlanes>(
          packed + layout.planes_at + tile * layout.tile_planes_bytes + kPlanes * kPlaneBytes, bits);
    Float::join(exponents, packed + layout.rests_at + tile * kTileValues * Float::kRestBytes, bits, values);
    int64_t low = std::max(begin, tile * kTileBytes), high = std::min(end, (tile + 1) * kTileBytes);
    std::memcpy(out + (low - begin), reinterpret_cast<unsigned char*>(values) + (low - tile * kTileBytes),
                (size_t)(high - low));
  }
}

template <typename Float, typename Moves>
void unpack(PackedKind kind, const unsigned char* packed, int64_t packed_bytes, int64_t raw_bytes, int64_t begin,
            int64_t end, unsigned char* out) {
  const BlockLayout layout(kind, raw_bytes);
  if (has_levels(kind)) {
    const LevelsReader<Moves> reader(layout, packed, packed_bytes);
    unpack_tiles<Float>(layout, packed, begin, end, out,
                        [&](int64_t tile, unsigned char* exponents) { reader.read(tile, exponents); });
    return;
  }
  const ExponentPairs table(packed);
  unpack_tiles<Float>(layout, packed, begin, end, out, [&](int64_t tile, unsigned char* exponents) {
    read_codes(layout, packed, packed_bytes, tile, table, exponents);
  });
}

#ifdef PENSTOCK_AVX2
// The same in wider vectors.
__attribute__((target("avx2"), flatten)) int64_t pack_with_avx2(PackedKind kind, const unsigned char* raw,
                                                               int64_t raw_bytes, unsigned char* packed) {
  return with_float(kind, [&](auto of) { return pack<decltype(of), ShuffleMoves>(kind, raw, raw_bytes, packed); });
}

__attribute__((target("avx2"), flatten)) void unpack_with_avx2(PackedKind kind, const unsigned char* packed,
                                                              int64_t packed_bytes, int64_t raw_bytes, int64_t begin,
                                                              int64_t end, unsigned char* out) {
  with_float(kind, [&](auto of) {
    unpack<decltype(of), ShuffleMoves>(kind, packed, packed_bytes, raw_bytes, begin, end, out);
  });
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

}  // namespace

bool is_packed_kind(int32_t kind) { return kind >= 1 && kind <= kPackedKinds; }

int64_t item_bytes(PackedKind kind) {
  return with_float(kind, [](auto of) { return (int64_t)sizeof(typename decltype(of)::Word); });
}

BlockLayout::BlockLayout(PackedKind kind, int64_t raw_bytes) {
  const int64_t rest_bytes = with_float(kind, [](auto of) { return decltype(of)::kRestBytes; });
  const int64_t rest_planes = with_float(kind, [](auto of) { return decltype(of)::kRestPlanes; });
  values = raw_bytes / item_bytes(kind);
  tiles = (values + kTileValues - 1) / kTileValues;
  tile_planes_bytes = ((has_levels(kind) ? 2 : kPlanes) + rest_planes) * kPlaneBytes;
  planes_at = padded(kHeaderBytes + (has_levels(kind) ? (tiles + 1) * 4 : tiles * 2));
  rests_at = planes_at + tiles * tile_planes_bytes;
  rests_end = rests_at + tiles * kTileValues * rest_bytes;
}

int64_t least_block_bytes(PackedKind kind, int64_t raw_bytes) { return BlockLayout(kind, raw_bytes).rests_end; }

int64_t most_block_bytes(PackedKind kind, int64_t raw_bytes) {
  BlockLayout layout(kind, raw_bytes);
  const int64_t groups = has_levels(kind) ? layout.tiles * kTileValues / kGroupCodes : 0;
  return padded(layout.rests_end + groups * kGroupBytes + layout.tiles * kTileValues);
}

int64_t pack_block(PackedKind kind, const unsigned char* raw, int64_t raw_bytes, unsigned char* packed) {
#ifdef PENSTOCK_AVX2
  if (has_avx2()) return pack_with_avx2(kind, raw, raw_bytes, packed);
#endif
  return with_float(kind, [&](auto of) { return pack<decltype(of), StepMoves>(kind, raw, raw_bytes, packed); });
}

void unpack_block(PackedKind kind, const unsigned char* packed, int64_t packed_bytes, int64_t raw_bytes, int64_t begin,
                  int64_t end, unsigned char* out) {
#ifdef PENSTOCK_AVX2
  if (has_avx2()) return unpack_with_avx2(kind, packed, packed_bytes, raw_bytes, begin, end, out);
#endif
  with_float(kind, [&](auto of) {
    unpack<decltype(of), StepMoves>(kind, packed, packed_bytes, raw_bytes, begin, end, out);
  });
}

}  // namespace penstock
