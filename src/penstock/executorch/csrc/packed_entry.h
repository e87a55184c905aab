// Weights that are packed in the data file, as docs/format.md has them: their headers and tables, checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "description.h"

namespace penstock_executorch {

// The blocks of one packed weight. Whether each can have its size, the core checks.
struct PackedEntry {
  int64_t kind;
  // From the beginning of the entry to the first block.
  int64_t data_offset_bytes;
  // Of the blocks, from there on; and the end of the last.
  std::vector<int64_t> begins_bytes;
};

// By its bytes, as an entry has no other mark that ExecuTorch tells: it begins with a header, and is not as long as the
// weight is, which ours never are.
bool is_packed_entry(const WeightFacts& weight, const void* data, size_t bytes);

// Throws LoadError(weight_mismatch) where it is one of another tensor, and LoadError(weights_file) where it is damaged.
PackedEntry read_packed_entry(const std::string& name, const WeightFacts& weight, const void* data, size_t bytes);

}  // namespace penstock_executorch
