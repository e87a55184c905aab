#include "packed_entry.h"

#include <algorithm>
#include <cstring>

#include "json.h"
#include "load_error.h"
#include "memory_order.h"

namespace penstock_executorch {
namespace {

constexpr int64_t kBlockRawBytes = 64 << 10;
constexpr int64_t kUnitBytes = 16;

struct Header {
  char magic[4];
  uint16_t version;
  uint16_t kind;
  uint64_t raw_bytes;
  uint32_t block_raw_bytes;
  uint32_t blocks;
  uint64_t zero;
};
static_assert(sizeof(Header) == 32, "as it stands in files");

struct PackedDtype {
  const char* name;
  int64_t scalar_type;
  uint16_t kind;
  uint16_t version;
};
// A dtype is in it as often as there are kinds of it.
constexpr PackedDtype kDtypes[] = {
    {"bfloat16", 15, 6, 3},      {"bfloat16", 15, 1, 1},      {"float32", 6, 2, 1},
    {"float16", 5, 3, 2},        {"float8_e4m3fn", 24, 4, 2}, {"float8_e4m3fnuz", 26, 4, 2},
    {"float8_e5m2", 23, 5, 2},   {"float8_e5m2fnuz", 25, 5, 2},
};

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw LoadError(Kind::weights_file, "packed weight '" + name + "' " + what);
}

}  // namespace

PackedRecords::PackedRecords(const executorch::runtime::NamedDataMap& data) {
  auto found = data.get_data("penstock.json");
  if (!found.ok()) return;
  try {
    Json text = Json::parse(std::string(static_cast<const char*>(found->data()), found->size()));
    for (const Json& row : text.at("entries").list()) {
      if (!row.has("packed")) continue;
      Record record{row.at("dtype").string(), row.at("shape").integers(), row.at("dim_order").integers()};
      records_.emplace(row.at("name").string(), record);
      for (const Json& alias : row.at("aliases").list()) records_.emplace(alias.string(), record);
    }
  } catch (const LoadError& error) {
    throw LoadError(Kind::weights_file, std::string("penstock.json in the data file is damaged: ") + error.what());
  }
  found->Free();
}

PackedEntry PackedRecords::read(const std::string& name, const WeightFacts& weight, const void* data,
                                size_t bytes) const {
  const Record& record = records_.at(name);
  const PackedDtype* dtype = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                          [&](const PackedDtype& each) { return record.dtype == each.name; });
  if (dtype == std::end(kDtypes)) refuse(name, "has dtype " + record.dtype + ", which this library cannot unpack");
  if (dtype->scalar_type != weight.scalar_type || record.shape != weight.shape ||
      memory_order(record.shape, record.dim_order) != memory_order(weight.shape, weight.dim_order))
    throw LoadError(Kind::weight_mismatch, "packed weight '" + name + "' is " + record.dtype + " of shape " +
                                             listed(record.shape) + " with dim order " + listed(record.dim_order) +
                                             " in the data file, the program needs scalar type " +
                                             std::to_string(weight.scalar_type) + " and shape " + listed(weight.shape) +
                                             " with dim order " + listed(weight.dim_order));
  Header header;
  if (bytes < sizeof header) refuse(name, "has " + std::to_string(bytes) + " bytes, its header needs 32");
  std::memcpy(&header, data, sizeof header);
  const bool is_kind = std::any_of(std::begin(kDtypes), std::end(kDtypes), [&](const PackedDtype& each) {
    return record.dtype == each.name && header.version == each.version && header.kind == each.kind;
  });
  const int64_t blocks = weight.bytes ? (weight.bytes - 1) / kBlockRawBytes + 1 : 0;
  if (std::memcmp(header.magic, "PSPK", 4) != 0 || !is_kind ||
      header.raw_bytes != (uint64_t)weight.bytes || header.block_raw_bytes != kBlockRawBytes ||
      header.blocks != (uint64_t)blocks || header.zero != 0)
    refuse(name, "has a header that is not that of " + std::to_string(weight.bytes) + " bytes of " + record.dtype +
                     ": it is damaged, or a newer Penstock wrote it");
  const int64_t sizes_bytes = (4 * blocks + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  PackedEntry entry{header.kind, (int64_t)sizeof header + sizes_bytes, {0}};
  if ((uint64_t)entry.data_offset_bytes > bytes) refuse(name, "is truncated: its table of blocks is not all there");
  for (int64_t block = 0; block < blocks; ++block) {
    uint32_t units;
    std::memcpy(&units, static_cast<const char*>(data) + sizeof header + 4 * block, sizeof units);
    entry.begins_bytes.push_back(entry.begins_bytes.back() + kUnitBytes * (int64_t)units);
  }
  if (entry.data_offset_bytes + entry.begins_bytes.back() != (int64_t)bytes)
    refuse(name, "has " + std::to_string(bytes) + " bytes, its table of blocks needs " +
                     std::to_string(entry.data_offset_bytes + entry.begins_bytes.back()));
  return entry;
}

}  // namespace penstock_executorch
