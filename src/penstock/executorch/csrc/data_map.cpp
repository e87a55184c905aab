// Checks ExecuTorch's weights against the program's, and finds where in the file they lie.
#include "data_map.h"

#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "load_error.h"
#include "mapping.h"
#include "packed_entry.h"
#include "penstock_records.h"
#include "tensor_layout.h"

namespace penstock_executorch {
namespace {

using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;

// What is wrong with the layout of a weight; empty if nothing is.
std::string layout_mismatch(const NamedDataMap& data, const std::string& name, const WeightFacts& weight,
                            size_t bytes) {
  std::string found = std::to_string(bytes) + " bytes";
  // A packed entry has no layout. ExecuTorch's reader does not expect that, and would crash if asked for it.
  if ((int64_t)bytes == weight.bytes) {
    auto layout = data.get_tensor_layout(name);
    if (!layout.ok()) {
      found += " without a dtype and a shape";
    } else {
      const std::vector<int64_t> shape(layout->sizes().begin(), layout->sizes().end());
      const std::vector<int64_t> order(layout->dim_order().begin(), layout->dim_order().end());
      const auto scalar_type = (int64_t)layout->scalar_type();
      if (shape == weight.shape && scalar_type == weight.scalar_type &&
          memory_order(shape, order) == memory_order(weight.shape, weight.dim_order))
        return "";
      found = layout_text(scalar_type, shape, order);
    }
  }
  return "'" + name + "' is " + found + ", needs " + layout_text(weight.scalar_type, weight.shape, weight.dim_order);
}

// Refuses what runtime/weights_fit.py refuses, in the same words. `path`: of the file that has the first of them
// found; empty if none was.
void check_fit(const std::string& path, size_t needed, const std::vector<std::string>& missing,
               const std::vector<std::string>& mismatches) {
  const std::string subject = path.empty() ? "the data" : path;
  if (!missing.empty())
    throw LoadError(Kind::missing_weight, subject + " lacks " + std::to_string(missing.size()) + " of the " +
                                            std::to_string(needed) + " weights of the program: " +
                                            joined(missing, [](const std::string& name) { return "'" + name + "'"; }));
  if (mismatches.empty()) return;
  std::string all;
  for (const std::string& mismatch : mismatches) all += (all.empty() ? "" : "; ") + mismatch;
  throw LoadError(Kind::weight_mismatch, subject + " does not fit the program: " + all);
}

void place_packed(WeightsPlace& place, const Payload& payload, const std::vector<std::optional<PackedEntry>>& packed) {
  const auto count = std::count_if(packed.begin(), packed.end(), [](const auto& entry) { return entry.has_value(); });
  if (!count) return;
  place.packed.numbers = {penstock::kRecordVersion, (int64_t)count};
  for (size_t i = 0; i < packed.size(); ++i) {
    if (!packed[i]) continue;
    const PackedEntry& entry = *packed[i];
    const int64_t numbers[] = {(int64_t)i, payload.weights[i].bytes, entry.kind, entry.data_offset_bytes};
    place.packed.numbers.insert(place.packed.numbers.end(), std::begin(numbers), std::end(numbers));
    place.packed.numbers.insert(place.packed.numbers.end(), entry.begins_bytes.begin(), entry.begins_bytes.end());
    place.packed.weights.insert((int64_t)i);
    for (size_t block = 1; block < entry.begins_bytes.size(); ++block)
      place.packed.largest_block_bytes = std::max(place.packed.largest_block_bytes,
                                                  entry.begins_bytes[block] - entry.begins_bytes[block - 1]);
  }
}

// A file that was packed for this program has plans for its packed weights. Any other has none, and the program's own
// plans will do.
void place_plans(WeightsPlace& place, const Payload& payload, const NamedDataMap& data) {
  if (place.packed.weights.empty()) return;
  auto found = data.get_data(packed_plans_key(payload));
  if (!found.ok()) return;
  auto held = std::make_shared<FreeableBuffer>(std::move(*found));
  place.packed.plan_tables = read_packed_plans(held->data(), held->size(), payload, place.packed);
  place.packed.plans_memory = std::move(held);
}

}  // namespace

WeightsPlace locate_weights(const NamedDataMap& data, const Payload& payload) {
  WeightsPlace place{};
  std::vector<FreeableBuffer> held;
  std::vector<std::optional<PackedEntry>> packed;
  std::vector<std::string> missing, mismatches;
  std::string first_path;
  for (const WeightFacts& weight : payload.weights) {
    bool is_there = false;
    for (const std::string& name : weight.names) {
      auto found = data.get_data(name);
      if (!found.ok()) continue;
      packed.emplace_back();
      if (is_packed_entry(weight, found->data(), found->size()))
        packed.back() = read_packed_entry(name, weight, found->data(), found->size());
      else if (std::string mismatch = layout_mismatch(data, name, weight, found->size()); !mismatch.empty())
        mismatches.push_back(std::move(mismatch));
      held.push_back(std::move(*found));
      is_there = true;
      // Before the others are read: in ExecuTorch's default mode, reading copies the whole file into main memory.
      if (held.back().size() && first_path.empty())
        first_path = Mappings().place(held.back().data(), "weight '" + weight.name + "'").path;
      break;
    }
    if (!is_there) missing.push_back(weight.name);
  }
  // First values of states that the file must have count as weights of the program.
  size_t needed = payload.weights.size();
  for (const StateFacts& state : payload.states) {
    if (!state.is_stored) continue;
    ++needed;
    auto found = data.get_data(state.name);
    if (!found.ok()) missing.push_back(state.name);
    else if (!missing.empty() && first_path.empty() && found->size())
      first_path = Mappings().place(found->data(), "state '" + state.name + "'").path;
  }
  check_fit(first_path, needed, missing, mismatches);
  Mappings mappings;
  for (size_t i = 0; i < held.size(); ++i) {
    const WeightFacts& weight = payload.weights[i];
    if (!weight.bytes) {
      place.spans.push_back({0, 0});
      continue;
    }
    FilePlace found = mappings.place(held[i].data(), "weight '" + weight.name + "'");
    if (!place.path.empty() && (found.device != place.device || found.inode != place.inode))
      throw LoadError(Kind::weights_file, "the weights of the program lie in several files, such as " + place.path +
                                            " and " + found.path + "; they must lie in one");
    place.path = found.path;
    place.device = found.device;
    place.inode = found.inode;
    place.spans.push_back({found.offset_bytes, (int64_t)held[i].size()});
  }
  for (FreeableBuffer& buffer : held) buffer.Free();
  struct stat status;
  if (place.path.empty()) throw LoadError(Kind::weights_file, "none of the program's weights has any bytes");
  if (stat(place.path.c_str(), &status))
    throw LoadError(Kind::weights_file, "the weights file " + place.path + " cannot be read");
  place.file_bytes = status.st_size;
  place_packed(place, payload, packed);
  place_plans(place, payload, data);
  return place;
}

}  // namespace penstock_executorch
