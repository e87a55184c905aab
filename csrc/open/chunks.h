// Where a mapped file is cut for registration. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/weight_places.h"

namespace penstock {

// One registration of 512 GiB or more has been reported to fail; far below that, the number of calls costs nothing.
constexpr int64_t kRegistrationLimitBytes = int64_t{64} << 30;

// Where each chunk ends, always on a page boundary of the system. No extent lies in two chunks, because a copy that
// spans two registrations fails. A chunk exceeds the limit only if an extent (or several that share pages) does, and
// then holds nothing else. The extents must lie in the file.
std::vector<size_t> chunk_ends(const std::vector<FileExtent>& extents, int64_t file_bytes, int64_t limit_bytes,
                               int64_t page_bytes);

}  // namespace penstock
