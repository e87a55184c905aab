// Opens and maps the weights file, reads it ahead, and compares it with what it was.
#include "host/host_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "driver/driver.h"
#include "host/fault_guard.h"

namespace penstock {
namespace {

// Large enough for a disk to stream, small enough that the threads share the work evenly.
constexpr size_t kPrefaultPartBytes = (size_t)16 << 20;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw CoreError(Failure::host_read, "weights file " + path + " " + what);
}

std::string system_text(int code) {
  return std::system_category().message(code) + " (errno " + std::to_string(code) + ")";
}

std::string bytes_text(int64_t bytes) { return std::to_string(bytes) + " bytes"; }

std::string time_text(const struct timespec& time) {
  std::string fraction = std::to_string(time.tv_nsec);
  return std::to_string(time.tv_sec) + "." + std::string(9 - fraction.size(), '0') + fraction + " s";
}

class Joined {
 public:
  ~Joined() {
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<std::thread> threads;
};

}  // namespace

size_t host_page_bytes() {
  static const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
  return bytes;
}

HostFile::HostFile(const std::string& path) : path_(path) {
  // Non-blocking: otherwise opening a pipe would wait for its writer before the pipe could be refused.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) refuse(path, "cannot be opened: " + system_text(errno));
  std::string problem;
  if (::fstat(fd_, &opened_) != 0) {
    problem = "cannot be examined: " + system_text(errno);
  } else if (!S_ISREG(opened_.st_mode)) {
    problem = "is not a regular file, and only a regular file can be mapped";
  } else if (opened_.st_size == 0) {
    problem = "is empty: it has 0 bytes, and at least one is needed";
  } else {
    // Shared: registering a private mapping read-only hangs in the driver.
    void* mapped = ::mmap(nullptr, (size_t)opened_.st_size, PROT_READ, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED)
      problem = "of " + bytes_text(opened_.st_size) + " cannot be mapped: " + system_text(errno);
    else
      data_ = static_cast<const unsigned char*>(mapped);
  }
  if (!problem.empty()) {
    ::close(fd_);
    refuse(path, problem);
  }
  mapping_ticket_ = remember_mapping(data_, bytes(), path_.c_str());
}

HostFile::~HostFile() {
  forget_mapping(mapping_ticket_);
  ::munmap(const_cast<unsigned char*>(data_), bytes());
  ::close(fd_);
}

void HostFile::check_unchanged() const {
  struct stat now;
  if (::fstat(fd_, &now) != 0) refuse(path_, "cannot be examined: " + system_text(errno));
  if (now.st_size != opened_.st_size)
    refuse(path_, "changed after it was loaded: it had " + bytes_text(opened_.st_size) + " and now has " +
                      bytes_text(now.st_size) + "; load it again");
  if (now.st_mtim.tv_sec != opened_.st_mtim.tv_sec || now.st_mtim.tv_nsec != opened_.st_mtim.tv_nsec)
    refuse(path_, "changed after it was loaded: it was modified at " + time_text(opened_.st_mtim) +
                      " since the epoch and now at " + time_text(now.st_mtim) + "; load it again");
}

void HostFile::prefault(size_t offset, size_t bytes, int threads, std::atomic<int64_t>& done_bytes) const {
  if (threads < 1) throw CoreError(Failure::usage, "prefault needs at least 1 thread, not " + std::to_string(threads));
  if (offset > this->bytes() || bytes > this->bytes() - offset)
    throw CoreError(Failure::usage, "bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) +
                                        " do not lie in weights file " + path_ + " of " +
                                        bytes_text(opened_.st_size));
  std::atomic<size_t> next{0};
  std::atomic<size_t> failed_at{SIZE_MAX};
  auto work = [&] {
    while (failed_at.load(std::memory_order_relaxed) == SIZE_MAX) {
      size_t at = next.fetch_add(kPrefaultPartBytes);
      if (at >= bytes) return;
      size_t part = std::min(kPrefaultPartBytes, bytes - at);
      const unsigned char* start = data_ + offset + at;
      size_t into_page = (offset + at) % host_page_bytes();
      // Only advice: the touch brings in, page by page, whatever this does not.
      ::madvise(const_cast<unsigned char*>(start - into_page), part + into_page, MADV_WILLNEED);
      if (guarded_touch(start, part))
        done_bytes.fetch_add((int64_t)part);
      else
        failed_at.store(offset + at);
    }
  };
  size_t parts = (bytes + kPrefaultPartBytes - 1) / kPrefaultPartBytes;
  {
    Joined others;
    try {
      for (size_t i = 1; i < std::min((size_t)threads, parts); ++i) others.threads.emplace_back(work);
    } catch (const std::system_error& error) {
      next.store(bytes);
      refuse(path_, "cannot be read by " + std::to_string(threads) + " threads: " + error.what());
    }
    work();
  }
  // Also after success: a file truncated within a page reads as zeros there.
  check_unchanged();
  if (failed_at.load() == SIZE_MAX) return;
  refuse(path_, "cannot be read between bytes " + std::to_string(failed_at.load()) + " and " +
                    std::to_string(std::min(failed_at.load() + kPrefaultPartBytes, offset + bytes)) +
                    ", although its size has not changed: its disk or its memory fails");
}

}  // namespace penstock
