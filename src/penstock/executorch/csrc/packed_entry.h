// Reads and checks the headers and tables of weights that are packed in the data file, as in docs/format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "description.h"

namespace penstock_executorch {

// The blocks of one packed weight. The core checks whether each can have its size.
struct PackedEntry {
  int64_t kind;
  // From the beginning of the entry to the first block.
  int64_t data_offset_bytes;
  // Where each block begins, counted from there, and where the last ends.
  std::vector<int64_t> begins_bytes;
};

// Told by its bytes, because ExecuTorch shows no other mark of an entry: it begins with a header, and its length
// differs from the weight's, as ours always do.
bool is_packed_entry(const WeightFacts& weight, const void* data, size_t bytes);

// Throws LoadError(weight_mismatch) if it is for another tensor, and LoadError(weights_file) if it is damaged.
PackedEntry read_packed_entry(const std::string& name, const WeightFacts& weight, const void* data, size_t bytes);

}  // namespace penstock_executorch
