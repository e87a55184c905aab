// Pages of the memory file: who has them, and where they are mapped.
#include "soft/soft_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace penstock {
namespace {

[[noreturn]] void fail(const char* call, int code, const std::string& text, Failure failure = Failure::driver) {
  throw DriverError(failure, std::string("soft ") + call, code, text);
}

[[noreturn]] void fail_system(const char* call, const std::string& what) {
  const int code = errno;
  fail(call, code, what + ": " + std::strerror(code));
}

std::string extent_text(Address address, size_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%zu bytes at 0x%llx", bytes, (unsigned long long)address);
  return text;
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

MemoryInfo system_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  size_t value = 0, available = 0, total = 0;
  while (file >> name >> value && std::getline(file, unit)) {
    if (name == "MemAvailable:") available = value * 1024;
    if (name == "MemTotal:") total = value * 1024;
  }
  if (!total || !available) fail("memory_info", ENOENT, "/proc/meminfo names no MemTotal or no MemAvailable");
  return {available, total};
}

}  // namespace

void SoftCapacity::take(const char* call, size_t bytes) {
  // Without a capacity of its own, the device has the machine's.
  const size_t most_bytes = capacity_bytes ? capacity_bytes : system_memory().total_bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t free_bytes = most_bytes - std::min(most_bytes, used_bytes_);
  if (bytes > free_bytes)
    fail(call, ENOMEM,
         std::to_string(bytes) + " bytes asked for, " + std::to_string(free_bytes) + " free of " +
             std::to_string(most_bytes),
         Failure::device_memory);
  used_bytes_ += bytes;
}

void SoftCapacity::give(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  used_bytes_ -= bytes;
}

MemoryInfo SoftCapacity::info() const {
  if (!capacity_bytes) return system_memory();
  std::lock_guard<std::mutex> lock(mutex_);
  return {capacity_bytes - used_bytes_, capacity_bytes};
}

SoftMemory::SoftMemory(size_t granularity_bytes, bool poison, SoftCapacity& capacity)
    : granularity_bytes(granularity_bytes), poison_(poison), capacity_(capacity) {
  const auto page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  if (granularity_bytes == 0 || granularity_bytes % page_bytes)
    fail("create", EINVAL,
         "a granularity of " + std::to_string(granularity_bytes) + " bytes is no multiple of the system's page of " +
             std::to_string(page_bytes));
  file_ = memfd_create("penstock", MFD_CLOEXEC);
  if (file_ < 0) fail_system("create", "memfd_create");
}

SoftMemory::~SoftMemory() {
  for (const auto& [address, bytes] : ranges_) munmap(pointer(address), bytes);
  close(file_);
}

void SoftMemory::check_extent(const char* call, Address address, size_t bytes) const {
  if (bytes == 0 || address % granularity_bytes || bytes % granularity_bytes)
    fail(call, EINVAL,
         extent_text(address, bytes) + " are not whole units of " + std::to_string(granularity_bytes) + " bytes");
}

Block SoftMemory::create_block(size_t bytes) {
  check_extent("create_block", 0, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  capacity_.take("create_block", bytes);
  if (ftruncate(file_, file_bytes_ + (int64_t)bytes)) {
    capacity_.give(bytes);
    fail("create_block", errno, "the memory file cannot grow by " + std::to_string(bytes) + " bytes",
         Failure::device_memory);
  }
  Pages pages{bytes, file_bytes_, 0, false};
  file_bytes_ += (int64_t)bytes;
  try {
    if (poison_) poison(pages);
  } catch (const DriverError&) {
    capacity_.give(bytes);
    throw;
  }
  blocks_[next_block_] = pages;
  handles_++;
  block_bytes_ += bytes;
  peak_block_bytes_ = std::max(peak_block_bytes_, block_bytes_);
  return next_block_++;
}

void SoftMemory::poison(const Pages& pages) const {
  const std::vector<unsigned char> chunk(std::min<size_t>(pages.bytes, 1 << 20), 0xFF);
  for (size_t done = 0; done < pages.bytes;) {
    const ssize_t wrote =
        pwrite(file_, chunk.data(), std::min(chunk.size(), pages.bytes - done), pages.offset + (int64_t)done);
    if (wrote <= 0)
      fail("create_block", errno, "the memory file has no room for " + std::to_string(pages.bytes) + " bytes",
           Failure::device_memory);
    done += (size_t)wrote;
  }
}

void SoftMemory::release_block(Block block) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(block);
  if (found == blocks_.end() || found->second.released)
    fail("release_block", EINVAL, "block " + std::to_string(block) + " does not exist or was released");
  found->second.released = true;
  handles_--;
  drop_if_unused(found);
}

void SoftMemory::drop_if_unused(std::map<Block, Pages>::iterator found) {
  const Pages pages = found->second;
  if (!pages.released || pages.mappings) return;
  blocks_.erase(found);
  block_bytes_ -= pages.bytes;
  capacity_.give(pages.bytes);
  if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, pages.offset, (off_t)pages.bytes))
    fail_system("release_block", "the pages could not be given back to the system");
}

Address SoftMemory::reserve(size_t bytes) {
  check_extent("reserve", 0, bytes);
  // One unit longer, and the ends are cut off: mmap itself aligns only to system pages.
  const size_t room_bytes = bytes + granularity_bytes;
  void* start = mmap(nullptr, room_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) fail_system("reserve", std::to_string(bytes) + " bytes of addresses");
  const auto room = reinterpret_cast<Address>(start);
  const Address address = (room + granularity_bytes - 1) / granularity_bytes * granularity_bytes;
  if (address > room) munmap(pointer(room), address - room);
  munmap(pointer(address + bytes), room + room_bytes - address - bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  ranges_[address] = bytes;
  return address;
}

void SoftMemory::unreserve(Address address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = ranges_.find(address);
  if (found == ranges_.end() || found->second != bytes)
    fail("unreserve", EINVAL, extent_text(address, bytes) + " were not reserved as one range");
  auto mapped = mappings_.lower_bound(address);
  if (mapped != mappings_.end() && mapped->first < address + bytes)
    fail("unreserve", EBUSY,
         extent_text(address, bytes) + " still hold a mapping of " + extent_text(mapped->first, mapped->second.bytes));
  ranges_.erase(found);
  if (munmap(pointer(address), bytes)) fail_system("unreserve", extent_text(address, bytes));
}

void SoftMemory::map(Address address, size_t bytes, Block block) {
  check_extent("map", address, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(block);
  if (found == blocks_.end() || found->second.released)
    fail("map", EINVAL, "block " + std::to_string(block) + " does not exist or was released");
  Pages& pages = found->second;
  if (pages.bytes != bytes)
    fail("map", EINVAL, "block " + std::to_string(block) + " has " + std::to_string(pages.bytes) + " bytes, not " +
                            std::to_string(bytes));
  auto range = ranges_.upper_bound(address);
  if (range == ranges_.begin() || (--range, address + bytes > range->first + range->second))
    fail("map", EINVAL, extent_text(address, bytes) + " do not lie in one reserved range");
  auto next = mappings_.lower_bound(address);
  if ((next != mappings_.end() && next->first < address + bytes) ||
      (next != mappings_.begin() && (--next, next->first + next->second.bytes > address)))
    fail("map", EEXIST, extent_text(address, bytes) + " overlap a mapping of " +
                            extent_text(next->first, next->second.bytes));
  // No access yet: a forgotten allow_access shows here as it does on a device.
  if (mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_, pages.offset) == MAP_FAILED)
    fail_system("map", extent_text(address, bytes));
  pages.mappings++;
  mappings_[address] = {bytes, block};
}

std::pair<SoftMemory::Mappings::iterator, SoftMemory::Mappings::iterator> SoftMemory::exact_mappings(
    const char* call, Address address, size_t bytes) {
  check_extent(call, address, bytes);
  const auto first = mappings_.find(address);
  auto last = first;
  Address reached = address;
  while (last != mappings_.end() && last->first == reached && reached < address + bytes)
    reached += (last++)->second.bytes;
  if (reached != address + bytes)
    fail(call, EINVAL, extent_text(address, bytes) + " are not made of whole mappings");
  return {first, last};
}

void SoftMemory::allow_access(Address address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  exact_mappings("allow_access", address, bytes);
  if (mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE))
    fail_system("allow_access", extent_text(address, bytes));
}

void SoftMemory::unmap(Address address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [first, last] = exact_mappings("unmap", address, bytes);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(pointer(address), bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
    fail_system("unmap", extent_text(address, bytes));
  while (first != last) {
    auto pages = blocks_.find(first->second.block);
    first = mappings_.erase(first);
    pages->second.mappings--;
    drop_if_unused(pages);
  }
}

SoftMemoryCounts SoftMemory::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {handles_, block_bytes_, peak_block_bytes_, ranges_.size(), mappings_.size()};
}

}  // namespace penstock
