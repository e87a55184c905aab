// How a tensor lies in memory: what its bytes depend on, and a description in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace penstock_executorch {

// The part of a dim order that the bytes depend on: a dimension of size 1 may stand anywhere.
std::vector<int64_t> memory_order(const std::vector<int64_t>& shape, const std::vector<int64_t>& order);

// "bfloat16"
std::string dtype_text(int64_t scalar_type);

// "bfloat16[3, 4]", and its dim order if that is not the usual one; as runtime/weights_fit.py has it.
std::string layout_text(int64_t scalar_type, const std::vector<int64_t>& shape, const std::vector<int64_t>& order);

}  // namespace penstock_executorch
