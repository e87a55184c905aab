// The mapping of the weights file, registered read-only with the device while this lives.
#pragma once

#include <cstddef>
#include <vector>

#include "driver/driver.h"
#include "host/host_file.h"

namespace penstock {

class Registration {
 public:
  // Chunk i is [ends[i - 1], ends[i]). Chunks are whole pages, chosen so that no copy spans two. The last one ends at
  // the file's end, rounded up to a page. All or nothing: if one chunk is refused, those before it are unregistered.
  Registration(Driver& driver, const HostFile& file, const std::vector<size_t>& ends);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  void release() noexcept;

  Driver& driver_;
  std::vector<const void*> starts_;
};

}  // namespace penstock
