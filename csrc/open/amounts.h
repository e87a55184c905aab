// Amounts of memory, some of them from a file. They are not negative and may be of any size.
#pragma once

#include <cstdint>

namespace penstock {

// Saturates instead of overflowing.
inline int64_t sum_of(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

}  // namespace penstock
