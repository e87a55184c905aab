// How much host memory this process may still pin, and what it has pinned: the machine's memory, every cgroup above it,
// and the weights files that are registered.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace penstock {

struct HostLimit {
  int64_t available_bytes;
  // What says so, for people.
  std::string source;
};

// The smallest of the machine's and of every cgroup limit above this process. `root` holds proc/ and sys/.
//
// File cache counts as available. Pinning a weights file pins pages of the file cache: those that are cached already are
// part of what the cgroup has in use, and pinning them adds nothing; the others push out cache of other files. Either
// way the bytes that must remain are those in use less the file cache. (Pages of the file that another cgroup brought in
// are charged there; counting them here errs on the safe side.) What cannot be pushed out is cache that is pinned: the
// kernel still lists it as file cache, so `pinned_bytes` are taken off. Throws CoreError(host_memory).
HostLimit host_limit(const std::string& root, int64_t pinned_bytes);

// The host memory of one load: refused where it exceeds the limit, before anything is pinned, and counted from then on, in
// one step. So of two loads at once the second is checked against what the first leaves. Throws CoreError(host_memory).
class HostShare {
 public:
  // Of buffers that are still to be allocated. `purpose` reads on from "for".
  HostShare(int64_t bytes, const std::string& purpose, const std::string& root = "/");
  // A whole weights file, counted once however often it is loaded, and so many bytes beside it.
  static std::unique_ptr<HostShare> of_file(const std::string& path, int64_t extra_bytes, const std::string& root = "/");
  ~HostShare();
  HostShare(const HostShare&) = delete;
  HostShare& operator=(const HostShare&) = delete;

  // All of the file is in the file cache now: it is among pinned_bytes().
  void file_has_come();
  // Whatever else was promised is allocated: the machine counts it as used, page by page as it is touched.
  void rest_is_allocated();

 private:
  HostShare() = default;

  std::optional<std::pair<dev_t, ino_t>> file_;
  int64_t promised_bytes_ = 0;
};

// Of the weights files that this process has in the file cache.
int64_t pinned_bytes();
// What registering this file takes of the limit: its size, less what is there for good already.
int64_t bytes_to_pin(const std::string& path, const std::string& root = "/");

}  // namespace penstock
