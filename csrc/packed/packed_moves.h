// Moves the chosen ones of eight bytes together, and apart again: in steps, or with one shuffle if the CPU has it.
#pragma once

#include <cstdint>

// A test compares the results of both: PENSTOCK_PLAIN_VECTORS leaves the shuffle out.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(PENSTOCK_PLAIN_VECTORS)
#define PENSTOCK_AVX2
#include <immintrin.h>
#endif

namespace penstock {

// Indexed by the mask of chosen bytes.
struct AllMoves {
  constexpr AllMoves() {
    for (int mask = 0; mask < 256; ++mask) {
      together[mask] = apart[mask] = ~0ull;
      for (int from = 0; from < 8; ++from) {
        if (!(mask >> from & 1)) continue;
        const int to = counts[mask]++;
        chosen[mask] |= 0xFFull << (8 * from);
        for (int step = 0, at = from; step < 3; ++step)
          if ((from - to) >> step & 1) {
            steps[mask][step] |= 0xFFull << (8 * at);
            at -= 1 << step;
          }
        together[mask] ^= (uint64_t)(0xFF ^ from) << (8 * to);
        apart[mask] ^= (uint64_t)(0xFF ^ to) << (8 * from);
      }
    }
  }
  unsigned char counts[256] = {};
  uint64_t chosen[256] = {};
  uint64_t steps[256][3] = {};  // for moves by 1, 2 and 4 bytes: which bytes move
  // For each byte, the index of the byte that moves there; 255 for none.
  uint64_t together[256] = {};
  uint64_t apart[256] = {};
};
constexpr AllMoves kMoves;

struct StepMoves {
  static uint64_t together(uint64_t eight, unsigned mask) {
    eight &= kMoves.chosen[mask];
    for (int step = 0; step < 3; ++step) {
      const uint64_t who = kMoves.steps[mask][step];
      eight = (eight & ~who) | ((eight & who) >> (8 << step));
    }
    return eight;
  }
  static uint64_t apart(uint64_t eight, unsigned mask) {
    for (int step = 2; step >= 0; --step) {
      const uint64_t who = kMoves.steps[mask][step];
      eight = (eight & ~who) | ((eight << (8 << step)) & who);
    }
    return eight & kMoves.chosen[mask];
  }
};

#ifdef PENSTOCK_AVX2
struct ShuffleMoves {
  __attribute__((target("avx2"))) static uint64_t together(uint64_t eight, unsigned mask) {
    return shuffled(eight, kMoves.together[mask]);
  }
  __attribute__((target("avx2"))) static uint64_t apart(uint64_t eight, unsigned mask) {
    return shuffled(eight, kMoves.apart[mask]);
  }

 private:
  __attribute__((target("avx2"))) static uint64_t shuffled(uint64_t eight, uint64_t order) {
    const __m128i moved = _mm_shuffle_epi8(_mm_cvtsi64_si128((int64_t)eight), _mm_cvtsi64_si128((int64_t)order));
    return (uint64_t)_mm_cvtsi128_si64(moved);
  }
};
#endif

}  // namespace penstock
