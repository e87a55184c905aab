// Device memory of the soft driver: pages of one memory file, which several address ranges can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "driver/driver.h"

namespace penstock {

// Bytes of the simulated device, shared by blocks and pools. A capacity of 0 is no limit.
class SoftCapacity {
 public:
  explicit SoftCapacity(size_t bytes) : capacity_bytes(bytes) {}
  // Throws Failure::device_memory, naming `call`, when the device has no room.
  void take(const char* call, size_t bytes);
  void give(size_t bytes);
  MemoryInfo info() const;
  const size_t capacity_bytes;

 private:
  mutable std::mutex mutex_;
  size_t used_bytes_ = 0;
};

struct SoftMemoryCounts {
  size_t blocks, block_bytes, peak_block_bytes, ranges, mappings;
};

class SoftMemory {
 public:
  // With poison, bytes that nobody has written yet read as 0xFF.
  SoftMemory(size_t granularity_bytes, bool poison, SoftCapacity& capacity);
  ~SoftMemory();
  SoftMemory(const SoftMemory&) = delete;
  SoftMemory& operator=(const SoftMemory&) = delete;

  Block create_block(size_t bytes);
  void release_block(Block block);
  Address reserve(size_t bytes);
  void unreserve(Address address, size_t bytes);
  void map(Address address, size_t bytes, Block block);
  void allow_access(Address address, size_t bytes);
  void unmap(Address address, size_t bytes);

  SoftMemoryCounts counts() const;
  const size_t granularity_bytes;

 private:
  // Physical memory lives as long as its handle or one of its mappings.
  struct Pages {
    size_t bytes;
    int64_t offset;
    size_t mappings;
    bool released;
  };
  struct Mapping {
    size_t bytes;
    Block block;
  };
  using Mappings = std::map<Address, Mapping>;

  void check_extent(const char* call, Address address, size_t bytes) const;
  // The mappings that fill [address, address + bytes) exactly: the first, and the one past the last.
  std::pair<Mappings::iterator, Mappings::iterator> exact_mappings(const char* call, Address address, size_t bytes);
  void drop_if_unused(std::map<Block, Pages>::iterator pages);
  void poison(const Pages& pages) const;

  const bool poison_;
  SoftCapacity& capacity_;
  mutable std::mutex mutex_;
  int file_ = -1;
  int64_t file_bytes_ = 0;  // never reused: what is given back becomes a hole
  Block next_block_ = 1;
  std::map<Block, Pages> blocks_;
  std::map<Address, size_t> ranges_;
  Mappings mappings_;
  size_t handles_ = 0;
  size_t block_bytes_ = 0;
  size_t peak_block_bytes_ = 0;
};

}  // namespace penstock
