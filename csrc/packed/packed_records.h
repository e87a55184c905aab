// What a session is told about the weights that are packed in its file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/weight_places.h"
#include "packed/packed_block.h"

namespace penstock {

struct PackedWeight {
  int64_t weight;
  int64_t raw_bytes;
  PackedKind kind;
  int64_t data_offset_bytes;          // of the first block, from where the weight begins in the file
  std::vector<int64_t> begins_bytes;  // where each block begins, from there; and where the last ends
};

// Reads numbers as src/penstock/runtime/records.py writes them, in the order of weight numbers. Throws RecordError if
// they cannot describe packed weights at these places.
std::vector<PackedWeight> read_packed(const int64_t* numbers, size_t count, const WeightPlaces& places);

}  // namespace penstock
