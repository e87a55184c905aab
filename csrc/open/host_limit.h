// How much host memory this process may still pin, and what it has pinned: the machine's memory, every cgroup above it,
// and the weights files that are registered.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
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

// Held from a check until what was checked is allocated: loads in other threads must not be told that it is available.
[[nodiscard]] std::unique_lock<std::mutex> host_memory_turn();

// A weights file that this process holds pinned, or is about to, so that other checks know of it; counted once however often
// it is. Refused where it exceeds the limit, with `extra_bytes` beside it.
class PinnedFile {
 public:
  PinnedFile(const std::string& path, int64_t extra_bytes, const std::string& root = "/");
  ~PinnedFile();
  PinnedFile(const PinnedFile&) = delete;
  PinnedFile& operator=(const PinnedFile&) = delete;

  // All of it has been brought into memory: it is part of what the machine says.
  void has_come();

 private:
  std::pair<dev_t, ino_t> key_;
};

// Of files that have come.
int64_t pinned_bytes();
// What registering this file takes of the limit: its size, less what is there for good already.
int64_t bytes_to_pin(const std::string& path, const std::string& root = "/");

}  // namespace penstock
