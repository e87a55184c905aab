// Splits the values of a tile into exponents and the rest, and joins them again. docs/format.md has the layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packed/packed_block.h"

namespace penstock {

// The rest is sign and mantissa, the sign on top. Its lowest whole bytes go to runs, one byte per value; the few bits
// above them go to planes. Loops over the values of a tile are innermost, so that compilers vectorize them.
template <typename Value, int kExponentBits, int kMantissaBits>
struct PackedFloat {
  using Word = Value;
  // As it lies in a file's bytes, at any address.
  typedef Value Stored __attribute__((aligned(1), may_alias));
  static_assert(sizeof(Word) * 8 == 1 + kExponentBits + kMantissaBits, "a sign, the exponent, the mantissa");
  static constexpr int kRestBytes = (1 + kMantissaBits) / 8;
  static constexpr int kRestPlanes = (1 + kMantissaBits) % 8;

  static void part(const Stored* values, unsigned char* __restrict exponents, unsigned char* __restrict rests,
                   unsigned char* __restrict bits) {
    for (int64_t i = 0; i < kTileValues; ++i) exponents[i] = (unsigned char)((values[i] >> kMantissaBits) & kExponents);
    for (int run = 0; run < kRestBytes; ++run)
      for (int64_t i = 0; i < kTileValues; ++i)
        rests[run * kTileValues + i] = (unsigned char)(rest(values[i]) >> (8 * run));
    if (kRestPlanes)
      for (int64_t i = 0; i < kTileValues; ++i) bits[i] = (unsigned char)(rest(values[i]) >> (8 * kRestBytes));
  }

  // In a damaged block an exponent may have more bits than the format has.
  static void join(const unsigned char* exponents, const unsigned char* rests, const unsigned char* bits,
                   Word* __restrict values) {
    for (int64_t i = 0; i < kTileValues; ++i) {
      Word left = 0;
      for (int run = 0; run < kRestBytes; ++run) left |= (Word)((Word)rests[run * kTileValues + i] << (8 * run));
      if (kRestPlanes) left |= (Word)((Word)bits[i] << (8 * kRestBytes));
      values[i] = (Word)(((left & kSign) << kExponentBits) | ((Word)(exponents[i] & kExponents) << kMantissaBits) |
                         (left & (kSign - 1)));
    }
  }

 private:
  static constexpr Word kExponents = (Word)((1 << kExponentBits) - 1);
  static constexpr Word kSign = (Word)((Word)1 << kMantissaBits);  // where the rest has it
  static Word rest(Word value) {
    return (Word)(((value >> kExponentBits) & kSign) | (value & (kSign - 1)));
  }
};

using Bfloat16 = PackedFloat<uint16_t, 8, 7>;
using Float32 = PackedFloat<uint32_t, 8, 23>;
using Float16 = PackedFloat<uint16_t, 5, 10>;
using Float8E4m3 = PackedFloat<uint8_t, 4, 3>;
using Float8E5m2 = PackedFloat<uint8_t, 5, 2>;

// Calls visit with the type for the kind, as a value.
template <typename Visit>
auto with_float(PackedKind kind, Visit visit) {
  switch (kind) {
    case PackedKind::float32: return visit(Float32());
    case PackedKind::float16: return visit(Float16());
    case PackedKind::float8_e4m3: return visit(Float8E4m3());
    case PackedKind::float8_e5m2: return visit(Float8E5m2());
    case PackedKind::bfloat16:
    case PackedKind::bfloat16_levels: break;
  }
  return visit(Bfloat16());
}

}  // namespace penstock
