#include "data_map.h"

#include <sys/stat.h>

#include "mapping.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;

// The part of a dim order that the bytes depend on: a dimension of size 1 may stand anywhere.
std::vector<int64_t> memory_order(const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  std::vector<int64_t> out;
  for (int64_t size : shape)
    if (size == 0) return out;
  for (int64_t dim : order)
    if (dim >= 0 && (size_t)dim < shape.size() && shape[(size_t)dim] != 1) out.push_back(dim);
  return out;
}

void check_layout(const NamedDataMap& data, const std::string& name, const WeightFacts& weight, size_t bytes) {
  if ((int64_t)bytes != weight.bytes)
    throw LoadError(Kind::weight_mismatch, "weight '" + name + "' has " + std::to_string(bytes) +
                                             " bytes in the data file, the program needs " +
                                             std::to_string(weight.bytes));
  auto layout = data.get_tensor_layout(name);
  if (!layout.ok())
    throw LoadError(Kind::weight_mismatch, "weight '" + name + "' has no dtype and shape in the data file");
  std::vector<int64_t> shape(layout->sizes().begin(), layout->sizes().end());
  std::vector<int64_t> order(layout->dim_order().begin(), layout->dim_order().end());
  auto scalar_type = (int64_t)layout->scalar_type();
  if (shape != weight.shape || scalar_type != weight.scalar_type ||
      memory_order(shape, order) != memory_order(weight.shape, weight.dim_order))
    throw LoadError(Kind::weight_mismatch, "weight '" + name + "' is of scalar type " +
                                             std::to_string(scalar_type) + " and shape " + listed(shape) +
                                             " with dim order " + listed(order) +
                                             " in the data file, the program needs scalar type " +
                                             std::to_string(weight.scalar_type) + " and shape " + listed(weight.shape) +
                                             " with dim order " + listed(weight.dim_order));
}

}  // namespace

WeightsPlace locate_weights(const NamedDataMap& data, const Payload& payload) {
  WeightsPlace place{};
  std::vector<FreeableBuffer> held;
  std::vector<std::string> missing;
  for (const WeightFacts& weight : payload.weights) {
    bool is_there = false;
    for (const std::string& name : weight.names) {
      auto found = data.get_data(name);
      if (!found.ok()) continue;
      check_layout(data, name, weight, found->size());
      held.push_back(std::move(*found));
      is_there = true;
      break;
    }
    if (!is_there) missing.push_back(weight.name);
  }
  if (!missing.empty()) {
    std::string names;
    for (size_t i = 0; i < missing.size() && i < 8; ++i) names += (i ? ", '" : "'") + missing[i] + "'";
    if (missing.size() > 8) names += " and " + std::to_string(missing.size() - 8) + " more";
    throw LoadError(Kind::missing_weight, "the data files lack " + std::to_string(missing.size()) + " of the " +
                                            std::to_string(payload.weights.size()) + " weights of the program: " +
                                            names + " (was the program's own .ptd given?)");
  }
  Mappings mappings;
  for (size_t i = 0; i < held.size(); ++i) {
    const WeightFacts& weight = payload.weights[i];
    if (!weight.bytes) {
      place.offsets.push_back(0);
      continue;
    }
    FilePlace found = mappings.place(held[i].data(), "weight '" + weight.name + "'");
    if (!place.path.empty() && (found.device != place.device || found.inode != place.inode))
      throw LoadError(Kind::weights_file, "the weights of the program lie in several files, such as " + place.path +
                                            " and " + found.path + "; they must lie in one");
    place.path = found.path;
    place.device = found.device;
    place.inode = found.inode;
    place.offsets.push_back(found.offset_bytes);
  }
  for (FreeableBuffer& buffer : held) buffer.Free();
  struct stat status;
  if (place.path.empty()) throw LoadError(Kind::weights_file, "none of the program's weights has any bytes");
  if (stat(place.path.c_str(), &status))
    throw LoadError(Kind::weights_file, "the weights file " + place.path + " cannot be read");
  place.file_bytes = status.st_size;
  for (size_t i = 0; i < place.offsets.size(); ++i)
    if (payload.weights[i].bytes > place.file_bytes - place.offsets[i])
      throw LoadError(Kind::weights_file, "the weights file " + place.path + " is truncated: it has " +
                                            std::to_string(place.file_bytes) + " bytes, weight '" +
                                            payload.weights[i].name + "' needs " +
                                            std::to_string(payload.weights[i].bytes) + " from byte " +
                                            std::to_string(place.offsets[i]));
  return place;
}

}  // namespace penstock_executorch
