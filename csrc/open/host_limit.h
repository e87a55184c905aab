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
  // Where the limit comes from, for messages.
  std::string source;
};

// The smallest limit: the machine's, or that of any cgroup above this process. `root` holds proc/ and sys/.
//
// File cache counts as available. Pinning a weights file pins pages of the file cache. Pages that are cached already
// are part of what the cgroup has in use, and pinning them adds nothing; the others push out cache of other files.
// Either way the bytes that must remain are those in use less the file cache. (Pages of the file that another cgroup
// brought in are charged there; counting them here errs on the safe side.) Pinned cache cannot be pushed out, but the
// kernel still lists it as file cache, so `pinned_bytes` are subtracted. Throws CoreError(host_memory).
HostLimit host_limit(const std::string& root, int64_t pinned_bytes);

// The host memory of one load. In one step, before anything is pinned, it is refused if it exceeds the limit, and
// counted from then on if not. So of two loads at once the second is checked against what the first leaves. Throws
// CoreError(host_memory).
class HostShare {
 public:
  // For buffers that are not allocated yet. `purpose` continues a message after "for".
  HostShare(int64_t bytes, const std::string& purpose, const std::string& root = "/");
  // For a whole weights file, counted once however often it is loaded, and `extra_bytes` beside it.
  static std::unique_ptr<HostShare> of_file(const std::string& path, int64_t extra_bytes, const std::string& root = "/");
  ~HostShare();
  HostShare(const HostShare&) = delete;
  HostShare& operator=(const HostShare&) = delete;

  // All of the file is in the file cache now, so pinned_bytes() includes it.
  void file_has_come();
  // Whatever else was promised is allocated now: the machine counts it as used, page by page, as it is touched.
  void rest_is_allocated();

 private:
  HostShare() = default;

  std::optional<std::pair<dev_t, ino_t>> file_;
  int64_t promised_bytes_ = 0;
};

// The bytes of weights files that this process has in the file cache.
int64_t pinned_bytes();
// How much of the limit registering this file takes: its size, less what is in memory for good already.
int64_t bytes_to_pin(const std::string& path, const std::string& root = "/");

}  // namespace penstock
