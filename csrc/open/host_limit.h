// How much host memory this process may still pin, and what it has pinned: the machine's memory, every cgroup above it,
// and the weights files that are registered.
#pragma once

#include <sys/types.h>

#include <cstdint>
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

// Refuses, before anything is pinned, what would exceed the limit. `purpose` reads on from "for".
void check_host_memory(int64_t needed_bytes, const std::string& purpose, const std::string& root = "/");

// A weights file that this process holds pinned, so that later checks know of it; counted once however often it is.
class PinnedFile {
 public:
  explicit PinnedFile(const std::string& path);
  ~PinnedFile();
  PinnedFile(const PinnedFile&) = delete;
  PinnedFile& operator=(const PinnedFile&) = delete;

 private:
  std::pair<dev_t, ino_t> key_;
};

int64_t pinned_bytes();
// What registering this file takes of the limit: its size, less what is there for good already.
int64_t bytes_to_pin(const std::string& path, const std::string& root = "/");

}  // namespace penstock
