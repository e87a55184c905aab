// Host memory of the soft driver: registration is bookkeeping, with the checks that a device's driver makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "driver/driver.h"

namespace penstock {

struct SoftHostCounts {
  size_t registrations, registered_bytes, allocations, bytes, peak_bytes;
};

class SoftHost {
 public:
  SoftHost() = default;
  ~SoftHost();
  SoftHost(const SoftHost&) = delete;
  SoftHost& operator=(const SoftHost&) = delete;

  void register_host(const void* start, size_t bytes);
  void unregister_host(const void* start);
  void require_registered(const void* start, size_t bytes) const;
  void* allocate(size_t bytes);
  void free(void* start);

  SoftHostCounts counts() const;

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, size_t> registered_;
  std::map<void*, size_t> allocated_;
  size_t registered_bytes_ = 0;
  size_t bytes_ = 0;
  size_t peak_bytes_ = 0;
};

}  // namespace penstock
