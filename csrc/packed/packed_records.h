// What a session is told of the weights that are packed in its file.
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
  std::vector<int64_t> begins_bytes;  // of the blocks, from there; and the end of the last
};

// Numbers as src/penstock/runtime/records.py writes them, by the numbers of weights. Throws RecordError where they cannot
// be packed weights that lie there.
std::vector<PackedWeight> read_packed(const int64_t* numbers, size_t count, const WeightPlaces& places);

}  // namespace penstock
