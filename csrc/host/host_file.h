// The weights file on the host: mapped read-only and shared, so that its bytes are the page cache's own and can be
// registered with a device.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock {

size_t host_page_bytes();

// Every failure is a CoreError(Failure::host_read) that names the file.
class HostFile {
 public:
  explicit HostFile(const std::string& path);
  ~HostFile();
  HostFile(const HostFile&) = delete;
  HostFile& operator=(const HostFile&) = delete;

  const unsigned char* data() const { return data_; }
  size_t bytes() const { return (size_t)opened_.st_size; }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  // Throws if the file's size or modification time has changed since it was opened.
  void check_unchanged() const;

  // Brings the bytes into memory with `threads` threads, the caller's included. `done_bytes` grows as they arrive.
  // Throws if the file is shorter than it was, or cannot be read.
  void prefault(size_t offset, size_t bytes, int threads, std::atomic<int64_t>& done_bytes) const;

 private:
  std::string path_;
  int fd_ = -1;
  struct stat opened_ = {};
  const unsigned char* data_ = nullptr;
  int mapping_ticket_ = -1;
};

}  // namespace penstock
