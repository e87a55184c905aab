// The number and size of staging buffers within a cap, and the number of reader threads. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "driver/driver.h"

namespace penstock {

struct StagingSizes {
  int64_t buffer_bytes;
  int32_t buffers;
  int32_t threads;
};

inline StagingSizes staging_sizes(int64_t cap_bytes, int64_t cores) {
  // Large enough for the full speed of a link, small enough that several fit a small cap.
  constexpr int64_t kBufferBytes = int64_t{16} << 20, kLeastBuffers = 4, kUnitBytes = 4096;
  // One reader copies out of the page cache at a few GB/s: it takes several to keep up with a link.
  constexpr int64_t kReaders = 8;
  const int64_t buffer_bytes = std::min(kBufferBytes, cap_bytes / kLeastBuffers / kUnitBytes * kUnitBytes);
  if (buffer_bytes < kUnitBytes)
    throw CoreError(Failure::host_memory, "a cap of " + std::to_string(cap_bytes) +
                                            " bytes of host memory is too small: staging needs at least " +
                                            std::to_string(kLeastBuffers * kUnitBytes));
  const int64_t buffers = cap_bytes / buffer_bytes;
  return {buffer_bytes, (int32_t)buffers, (int32_t)std::max<int64_t>(1, std::min({kReaders, buffers, cores / 2}))};
}

}  // namespace penstock
