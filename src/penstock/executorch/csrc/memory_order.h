// The part of a dim order that the bytes depend on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock_executorch {

// A dimension of size 1 may stand anywhere.
inline std::vector<int64_t> memory_order(const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  std::vector<int64_t> out;
  for (int64_t size : shape)
    if (size == 0) return out;
  for (int64_t dim : order)
    if (dim >= 0 && (size_t)dim < shape.size() && shape[(size_t)dim] != 1) out.push_back(dim);
  return out;
}

}  // namespace penstock_executorch
