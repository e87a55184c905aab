// Tracks which bytes of a pool are taken, on which stream, and keeps pages of released allocations for later ones.
#include "soft/soft_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace penstock {
namespace {

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

SoftPool::~SoftPool() {
  for (const auto& [address, allocation] : live_) munmap(pointer(address), allocation.room_bytes);
  for (const auto& room : rooms_) munmap(pointer(room->address), room->room_bytes);
  capacity_.give(held_bytes_);
}

size_t SoftPool::unused_bytes(Stream stream, bool of_others) const {
  size_t bytes = 0;
  for (const auto& release : pending_)
    if ((release->stream != stream) == of_others) bytes += release->unused;
  return bytes;
}

SoftPool::Lease SoftPool::allocate(size_t bytes, Stream stream) {
  if (bytes == 0) throw DriverError(Failure::driver, "soft pool_allocate", EINVAL, "0 bytes asked for");
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t taken_bytes = live_bytes_ + unused_bytes(stream, true);
  if (bytes > max_bytes_ - taken_bytes)
    throw DriverError(Failure::device_memory, "soft pool_allocate", ENOMEM,
                      std::to_string(bytes) + " bytes asked for, " + std::to_string(max_bytes_ - taken_bytes) +
                          " free for this stream of " + std::to_string(max_bytes_) + " in the pool");
  // The stream's own released bytes first: other streams cannot have those yet.
  const size_t again_bytes = std::min(bytes, unused_bytes(stream, false));
  capacity_.take("pool_allocate", bytes - again_bytes);
  Lease lease;
  try {
    lease = take_room(bytes, stream);
  } catch (const DriverError&) {
    capacity_.give(bytes - again_bytes);
    throw;
  }
  size_t left_bytes = again_bytes;
  for (const auto& release : pending_) {
    if (release->stream != stream) continue;
    const size_t part_bytes = std::min(left_bytes, release->unused);
    release->unused -= part_bytes;
    left_bytes -= part_bytes;
  }
  live_[lease.address] = {bytes, lease.room_bytes};
  live_bytes_ += bytes;
  held_bytes_ += bytes - again_bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  return lease;
}

SoftPool::Lease SoftPool::take_room(size_t bytes, Stream stream) {
  const auto page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  const size_t room_bytes = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  // The address that was released last is reused first: in this order a missing wait shows soonest.
  for (auto room = rooms_.begin(); room != rooms_.end(); ++room) {
    if ((*room)->room_bytes != room_bytes || !((*room)->executed || (*room)->stream == stream)) continue;
    const Lease lease{(*room)->address, room_bytes, false};
    rooms_.erase(room);
    return lease;
  }
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(nullptr, room_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (start == MAP_FAILED)
    throw DriverError(Failure::device_memory, "soft pool_allocate", errno,
                      std::to_string(room_bytes) + " bytes could not be mapped: " + std::strerror(errno));
  return {reinterpret_cast<Address>(start), room_bytes, true};
}

std::shared_ptr<SoftPool::Release> SoftPool::release(Address address, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(address);
  if (found == live_.end())
    throw DriverError(Failure::driver, "soft pool_release", EINVAL,
                      "the pool lent nothing at address " + std::to_string(address) + ", or has it back");
  const Allocation allocation = found->second;
  auto release = std::make_shared<Release>(Release{stream, address, allocation.room_bytes, allocation.bytes});
  pending_.push_back(release);
  rooms_.push_front(release);
  live_.erase(found);
  live_bytes_ -= allocation.bytes;
  return release;
}

void SoftPool::execute(Release& release) {
  // Before anybody else gets the bytes. Without poison the pages go back, so that the pool's cap holds for RAM too.
  if (poison_)
    std::memset(pointer(release.address), kPoison, release.room_bytes);
  else
    madvise(pointer(release.address), release.room_bytes, MADV_DONTNEED);
  std::lock_guard<std::mutex> lock(mutex_);
  release.executed = true;
  held_bytes_ -= release.unused;
  capacity_.give(release.unused);
  pending_.remove_if([&release](const std::shared_ptr<Release>& other) { return other.get() == &release; });
}

size_t SoftPool::live() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return live_.size();
}

size_t SoftPool::live_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return live_bytes_;
}

size_t SoftPool::peak_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_bytes_;
}

}  // namespace penstock
