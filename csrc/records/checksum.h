// The checksum of everything that Penstock writes: XXH3 with 64 bits and seed 0. Weights files have one per entry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

uint64_t checksum(const void* data, size_t bytes);

}  // namespace penstock
