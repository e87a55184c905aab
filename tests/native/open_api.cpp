// What tests ask of csrc/open beyond the core's C interface: its rules by themselves.
#include "open/byte_text.h"
#include "open/chunks.h"
#include "open/host_limit.h"
#include "open/staging_sizes.h"
#include "status.h"

using penstock::to_status;

extern "C" {

// At most `capacity` ends; `count` is how many there are.
int32_t penstock_test_chunk_ends(const penstock::FileExtent* extents, int64_t extent_count, int64_t file_bytes,
                                 int64_t limit_bytes, int64_t page_bytes, int64_t* ends, int64_t capacity,
                                 int64_t* count) {
  return to_status([&] {
    auto found = penstock::chunk_ends({extents, extents + extent_count}, file_bytes, limit_bytes, page_bytes);
    *count = (int64_t)found.size();
    for (int64_t i = 0; i < *count && i < capacity; ++i) ends[i] = (int64_t)found[(size_t)i];
  });
}

int32_t penstock_test_staging_sizes(int64_t cap_bytes, int64_t cores, int64_t* out) {
  return to_status([&] {
    const penstock::StagingSizes sizes = penstock::staging_sizes(cap_bytes, cores);
    out[0] = sizes.buffer_bytes;
    out[1] = sizes.buffers;
    out[2] = sizes.threads;
  });
}

int32_t penstock_test_check_host_memory(int64_t needed_bytes, const char* purpose, const char* root) {
  return to_status([&] { penstock::check_host_memory(needed_bytes, purpose, root); });
}

int32_t penstock_test_bytes_to_pin(const char* path, const char* root, int64_t* out) {
  return to_status([&] { *out = penstock::bytes_to_pin(path, root); });
}

void* penstock_test_pin(const char* path) { return new penstock::PinnedFile(path); }
void penstock_test_unpin(void* pinned) { delete static_cast<penstock::PinnedFile*>(pinned); }

// Good until the next call on this thread.
const char* penstock_test_format_bytes(int64_t bytes) {
  thread_local std::string text;
  text = penstock::format_bytes(bytes);
  return text.c_str();
}

}  // extern "C"
