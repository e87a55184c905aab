// Weights that are packed in the data file, as docs/format.md has them: their records, headers and tables, checked.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include <map>
#include <optional>
#include <string>

#include "payload.h"

namespace penstock_executorch {

// The blocks of one packed weight. Whether each can have its size, the core checks.
struct PackedEntry {
  int64_t kind;
  // From the beginning of the entry to the first block.
  int64_t data_offset_bytes;
  // Of the blocks, from there on; and the end of the last.
  std::vector<int64_t> begins_bytes;
};

// What penstock.json in the data files says of packed weights; nothing, where there is none.
class PackedRecords {
 public:
  // Throws LoadError(weights_file) where it cannot be read.
  explicit PackedRecords(const executorch::runtime::NamedDataMap& data);
  bool has(const std::string& name) const { return records_.count(name) != 0; }
  // Throws LoadError(weight_mismatch) where it is none of this weight, and LoadError(weights_file) where it is damaged.
  PackedEntry read(const std::string& name, const WeightFacts& weight, const void* data, size_t bytes) const;

 private:
  struct Record {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<int64_t> dim_order;
  };
  std::map<std::string, Record> records_;
};

}  // namespace penstock_executorch
