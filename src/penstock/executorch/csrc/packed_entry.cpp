// Reads headers and tables of packed weights, and refuses inconsistent ones.
#include "packed_entry.h"

#include <algorithm>
#include <cstring>

#include "core.h"
#include "load_error.h"
#include "tensor_layout.h"

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
  uint64_t layout;
};
static_assert(sizeof(Header) == 32, "as it stands in files");

struct PackedDtype {
  int64_t scalar_type;
  uint16_t kind;
  uint16_t version;
};
// A dtype is listed once for each of its kinds.
constexpr PackedDtype kDtypes[] = {{15, 6, 3}, {15, 1, 1}, {6, 2, 1},  {5, 3, 2},
                                   {24, 4, 2}, {26, 4, 2}, {23, 5, 2}, {25, 5, 2}};

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw LoadError(Kind::weights_file, "packed weight '" + name + "' " + what);
}

uint64_t layout_checksum(const WeightFacts& weight) {
  std::vector<int64_t> numbers{weight.scalar_type, (int64_t)weight.shape.size()};
  const std::vector<int64_t> order = memory_order(weight.shape, weight.dim_order);
  numbers.insert(numbers.end(), weight.shape.begin(), weight.shape.end());
  numbers.insert(numbers.end(), order.begin(), order.end());
  return core().checksum(numbers.data(), (int64_t)(numbers.size() * sizeof(int64_t)));
}

int64_t blocks_of(uint64_t raw_bytes) { return raw_bytes ? (int64_t)((raw_bytes - 1) / kBlockRawBytes + 1) : 0; }

}  // namespace

bool is_packed_entry(const WeightFacts& weight, const void* data, size_t bytes) {
  return bytes != (size_t)weight.bytes && bytes >= sizeof(Header) && std::memcmp(data, "PSPK", 4) == 0;
}

PackedEntry read_packed_entry(const std::string& name, const WeightFacts& weight, const void* data, size_t bytes) {
  Header header;
  std::memcpy(&header, data, sizeof header);
  const char* damaged = "has a header that holds no packed weight: it is damaged, or a newer Penstock wrote it";
  if (header.block_raw_bytes != kBlockRawBytes || header.blocks != (uint64_t)blocks_of(header.raw_bytes))
    refuse(name, damaged);
  if (!header.layout)
    refuse(name, "has no checksum of its layout: an earlier Penstock packed it. Pack it again: penstock unpack, and then "
                 "penstock pack");
  if (header.layout != layout_checksum(weight) || header.raw_bytes != (uint64_t)weight.bytes)
    throw LoadError(Kind::weight_mismatch, "the data files do not fit the program: packed '" + name + "' is " +
                                             std::to_string(header.raw_bytes) + " bytes of another layout, needs " +
                                             layout_text(weight.scalar_type, weight.shape, weight.dim_order));
  const bool is_kind = std::any_of(std::begin(kDtypes), std::end(kDtypes), [&](const PackedDtype& each) {
    return weight.scalar_type == each.scalar_type && header.version == each.version && header.kind == each.kind;
  });
  if (!is_kind) refuse(name, damaged);
  const int64_t blocks = header.blocks;
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
