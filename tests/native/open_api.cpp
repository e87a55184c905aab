// What tests ask of csrc/open beyond the core's C interface: its rules by themselves.
#include "open/chunks.h"
#include "open/host_limit.h"
#include "open/registration_probe.h"
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
  return to_status([&] { penstock::HostShare(needed_bytes, purpose, root); });
}

int32_t penstock_test_bytes_to_pin(const char* path, const char* root, int64_t* out) {
  return to_status([&] { *out = penstock::bytes_to_pin(path, root); });
}

void* penstock_test_pin(const char* path) {
  auto made = penstock::HostShare::of_file(path, 0);
  made->file_has_come();
  return made.release();
}
void penstock_test_unpin(void* pinned) { delete static_cast<penstock::HostShare*>(pinned); }

// Probes with answers of their own, that another program than the core's gives.
void* penstock_test_answers() { return new penstock::ProbeAnswers; }
void penstock_test_answers_destroy(void* answers) { delete static_cast<penstock::ProbeAnswers*>(answers); }

int32_t penstock_test_probe_begin(const char* path, int32_t device_index, const char* program, double timeout_s,
                                  void* answers, void** out) {
  return to_status([&] {
    *out = new penstock::RegistrationProbe(path, device_index, program, timeout_s,
                                           *static_cast<penstock::ProbeAnswers*>(answers));
  });
}

int32_t penstock_test_probe_require(void* probe, int32_t (*on_wait)(int64_t)) {
  return to_status([&] { static_cast<penstock::RegistrationProbe*>(probe)->require(on_wait); });
}

void penstock_test_probe_destroy(void* probe) { delete static_cast<penstock::RegistrationProbe*>(probe); }

// Good until the next call on this thread.
const char* penstock_test_probe_program() {
  thread_local std::string text;
  text = penstock::probe_program();
  return text.c_str();
}

}  // extern "C"
