// Amounts of memory, some of them from a file: not negative, and of any size.
#pragma once

#include <cstdint>

namespace penstock {

// Never overflows.
inline int64_t sum_of(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

}  // namespace penstock
