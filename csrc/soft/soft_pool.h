// A capped, stream-ordered pool of the soft driver. It counts live bytes; every allocation has pages of its own, so
// that no allocation fails for fragmentation.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "driver/driver.h"
#include "soft/soft_memory.h"

namespace penstock {

class SoftPool {
 public:
  // A release that its stream may not have reached yet. Until then only that stream may get the bytes again, because it
  // touches them after the release whatever the host does.
  struct Release {
    Stream stream;
    Address address;
    size_t room_bytes;
    size_t unused;  // bytes of the allocation that the same stream has not yet taken again
    bool executed = false;
  };

  struct Lease {
    Address address;
    size_t room_bytes;
    bool fresh;
  };

  SoftPool(size_t max_bytes, bool poison, SoftCapacity& capacity)
      : max_bytes_(max_bytes), poison_(poison), capacity_(capacity) {}
  ~SoftPool();
  SoftPool(const SoftPool&) = delete;
  SoftPool& operator=(const SoftPool&) = delete;

  // Touches no byte of the memory.
  Lease allocate(size_t bytes, Stream stream);
  // The two halves of a release: on the host, then in stream order.
  std::shared_ptr<Release> release(Address address, Stream stream);
  void execute(Release& release);

  size_t live() const;
  size_t live_bytes() const;
  size_t peak_bytes() const;

 private:
  struct Allocation {
    size_t bytes;
    size_t room_bytes;
  };

  size_t unused_bytes(Stream stream, bool of_others) const;
  Lease take_room(size_t bytes, Stream stream);

  const size_t max_bytes_;
  const bool poison_;
  SoftCapacity& capacity_;
  mutable std::mutex mutex_;
  std::map<Address, Allocation> live_;
  std::list<std::shared_ptr<Release>> pending_;  // not yet executed
  std::list<std::shared_ptr<Release>> rooms_;    // addresses to reuse, newest first
  size_t live_bytes_ = 0;
  size_t held_bytes_ = 0;  // live, and released but not yet executed
  size_t peak_bytes_ = 0;
};

}  // namespace penstock
