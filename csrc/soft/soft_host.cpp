// Keeps track of what is registered and allocated, and refuses wrong calls.
#include "soft/soft_host.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <string>

namespace penstock {
namespace {

[[noreturn]] void fail(const char* call, int code, const std::string& text) {
  throw DriverError(Failure::registration, std::string("soft ") + call, code, text);
}

std::string extent_text(uintptr_t start, size_t bytes) {
  return std::to_string(bytes) + " bytes of host memory at " + std::to_string(start);
}

}  // namespace

SoftHost::~SoftHost() {
  for (const auto& [start, bytes] : allocated_) std::free(start);
}

void SoftHost::register_host(const void* pointer, size_t bytes) {
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  const auto page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  if (bytes == 0) fail("register_host", EINVAL, "0 bytes asked for");
  if (start % page_bytes)
    fail("register_host", EINVAL,
         extent_text(start, bytes) + " do not start on a page of " + std::to_string(page_bytes) + " bytes");
  std::lock_guard<std::mutex> lock(mutex_);
  auto other = registered_.lower_bound(start);
  if ((other != registered_.end() && other->first < start + bytes) ||
      (other != registered_.begin() && (--other, other->first + other->second > start)))
    fail("register_host", EEXIST,
         extent_text(start, bytes) + " overlap " + extent_text(other->first, other->second) +
             ", which are registered already");
  registered_[start] = bytes;
  registered_bytes_ += bytes;
}

void SoftHost::unregister_host(const void* pointer) {
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = registered_.find(start);
  if (found == registered_.end())
    fail("unregister_host", ENOENT, "no registration starts at " + std::to_string(start));
  registered_bytes_ -= found->second;
  registered_.erase(found);
}

void SoftHost::require_registered(const void* pointer, size_t bytes) const {
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = registered_.upper_bound(start);
  uintptr_t reached = start;
  if (next != registered_.begin()) reached = std::max(start, std::prev(next)->first + std::prev(next)->second);
  for (; reached < start + bytes && next != registered_.end() && next->first == reached; ++next) reached += next->second;
  if (reached < start + bytes)
    fail("host_address", EINVAL,
         extent_text(start, bytes) + " are registered for " + std::to_string(reached - start) + " bytes only");
}

void* SoftHost::allocate(size_t bytes) {
  if (bytes == 0) fail("allocate_host", EINVAL, "0 bytes asked for");
  void* start = nullptr;
  if (int code = posix_memalign(&start, (size_t)sysconf(_SC_PAGESIZE), bytes))
    fail("allocate_host", code, std::to_string(bytes) + " bytes are not to be had");
  std::lock_guard<std::mutex> lock(mutex_);
  allocated_[start] = bytes;
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  return start;
}

void SoftHost::free(void* start) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = allocated_.find(start);
    if (found == allocated_.end())
      fail("free_host", ENOENT,
           "no host memory was allocated at " + std::to_string(reinterpret_cast<uintptr_t>(start)));
    bytes_ -= found->second;
    allocated_.erase(found);
  }
  std::free(start);
}

SoftHostCounts SoftHost::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {registered_.size(), registered_bytes_, allocated_.size(), bytes_, peak_bytes_};
}

}  // namespace penstock
