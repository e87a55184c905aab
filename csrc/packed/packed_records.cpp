// No sum of these numbers overflows: each block begins within its weight's bytes in the file.
#include "packed/packed_records.h"

#include <algorithm>
#include <string>

#include "penstock_records.h"

namespace penstock {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

[[noreturn]] void refuse(const std::string& what) { throw RecordError("packed weights: " + what); }

PackedWeight read_weight(RecordReader& in, const WeightPlaces& places, int64_t first) {
  PackedWeight weight{};
  weight.weight = in.next(first, (int64_t)places.count());
  weight.raw_bytes = in.next(1, INT64_MAX);
  const int64_t kind = in.next(0, INT32_MAX);
  if (!is_packed_kind((int32_t)kind)) refuse(text(kind) + " is no kind of values");
  weight.kind = (PackedKind)kind;
  if (weight.raw_bytes % item_bytes(weight.kind)) refuse(text(weight.raw_bytes) + " bytes are no whole values");
  const int64_t stored_bytes = places[(size_t)weight.weight].bytes;
  weight.data_offset_bytes = in.next(0, stored_bytes + 1);
  const int64_t most_bytes = stored_bytes - weight.data_offset_bytes;
  const int64_t blocks = (weight.raw_bytes - 1) / kBlockRawBytes + 1;
  weight.begins_bytes.push_back(in.next(0, 1));
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t raw = std::min(kBlockRawBytes, weight.raw_bytes - block * kBlockRawBytes);
    const int64_t bytes = in.next(0, most_bytes + 1) - weight.begins_bytes.back();
    if (bytes % kPackedUnitBytes || bytes < least_block_bytes(weight.kind, raw) ||
        bytes > most_block_bytes(weight.kind, raw))
      refuse("block " + text(block) + " has " + text(bytes) + " bytes, which no " + text(raw) + " bytes take");
    weight.begins_bytes.push_back(weight.begins_bytes.back() + bytes);
  }
  return weight;
}

}  // namespace

std::vector<PackedWeight> read_packed(const int64_t* numbers, size_t count, const WeightPlaces& places) {
  RecordReader in(numbers, count, "packed weights");
  std::vector<PackedWeight> weights;
  for (size_t left = in.length(); left > 0; --left)
    weights.push_back(read_weight(in, places, weights.empty() ? 0 : weights.back().weight + 1));
  in.finish();
  return weights;
}

}  // namespace penstock
