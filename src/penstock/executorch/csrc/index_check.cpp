// Compiled code that meets an index outside its table ends the process, or leaves the GPU unusable.
#include "index_check.h"

#include <algorithm>
#include <cstring>

#include "load_error.h"

namespace penstock_executorch {
namespace {

template <typename Number>
int64_t read(const char* at) {
  Number number;
  std::memcpy(&number, at, sizeof number);
  return (int64_t)number;
}

// Integer types, by ExecuTorch's number of the scalar type; the record was checked to name one of these.
struct WholeNumbers {
  int64_t bytes;
  int64_t (*read)(const char*);
};
constexpr WholeNumbers kWholeNumbers[kWholeNumberTypes] = {
    {1, read<uint8_t>}, {1, read<int8_t>}, {2, read<int16_t>}, {4, read<int32_t>}, {8, read<int64_t>}};

// Ends of slices as Python computes them.
int64_t end_of_slice(int64_t end, int64_t size) { return std::clamp<int64_t>(end < 0 ? end + size : end, 0, size); }

std::string message(const InputFacts& facts, const IndexFacts& index, const std::vector<int64_t>& place, int64_t number) {
  const std::string entries =
      index.dim == 0 ? "'" + index.table + "', which has " + std::to_string(index.size) + " rows"
                     : "dimension " + std::to_string(index.dim) + " of '" + index.table + "', which has " +
                           std::to_string(index.size) + " entries";
  return "input '" + facts.name + "' is " + std::to_string(number) + (place.empty() ? "" : " at " + listed(place)) +
         "; needs to be at least " + std::to_string(index.low) + " and below " + std::to_string(index.high) +
         ": it indexes " + entries;
}

void check(const InputFacts& facts, const IndexFacts& index, const TensorView& view) {
  const WholeNumbers numbers = kWholeNumbers[facts.scalar_type];
  const size_t dims = view.sizes.size();
  std::vector<int64_t> begin(dims), end(view.sizes), step(dims, 1);
  for (size_t d = 0; d < index.region.size(); ++d) {
    begin[d] = end_of_slice(index.region[d].begin, view.sizes[d]);
    end[d] = end_of_slice(index.region[d].end, view.sizes[d]);
    step[d] = index.region[d].step;
  }
  for (size_t d = 0; d < dims; ++d)
    if (begin[d] >= end[d]) return;
  std::vector<int64_t> place = begin;
  while (true) {
    int64_t offset = 0;
    for (size_t d = 0; d < dims; ++d) offset += place[d] * view.strides[d];
    const int64_t number = numbers.read(static_cast<const char*>(view.data) + offset * numbers.bytes);
    if (number < index.low || number >= index.high) throw LoadError(Kind::input, message(facts, index, place, number));
    size_t d = dims;
    while (d-- > 0) {
      // Without a sum, which could overflow: a step may be as large as a number can be.
      if (step[d] < end[d] - place[d]) {
        place[d] += step[d];
        break;
      }
      place[d] = begin[d];
    }
    if (d == SIZE_MAX) return;
  }
}

}  // namespace

void check_indices(const InputFacts& facts, const TensorView& view) {
  for (const IndexFacts& index : facts.indexes) check(facts, index, view);
}

}  // namespace penstock_executorch
