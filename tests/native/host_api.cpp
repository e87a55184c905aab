// The host side by itself over a C interface. status.h says how failures are told.
#include <atomic>
#include <vector>

#include "host/fault_guard.h"
#include "host/host_file.h"
#include "host/registration.h"
#include "host/staging.h"
#include "status.h"

using penstock::Address;
using penstock::Driver;
using penstock::Extent;
using penstock::HostFile;
using penstock::Registration;
using penstock::Staging;
using penstock::Stream;
using penstock::to_status;

extern "C" {

int32_t penstock_test_file_open(const char* path, HostFile** out) {
  return to_status([&] { *out = new HostFile(path); });
}
void penstock_test_file_close(HostFile* file) { delete file; }
const void* penstock_test_file_data(const HostFile* file) { return file->data(); }
int64_t penstock_test_file_bytes(const HostFile* file) { return (int64_t)file->bytes(); }
int32_t penstock_test_file_check(const HostFile* file) {
  return to_status([&] { file->check_unchanged(); });
}
// `done_bytes` is written once, at the end, also after a failure.
int32_t penstock_test_file_prefault(const HostFile* file, int64_t offset_bytes, int64_t bytes, int32_t threads,
                                    int64_t* done_bytes) {
  std::atomic<int64_t> done{0};
  int32_t failure = to_status([&] { file->prefault((size_t)offset_bytes, (size_t)bytes, threads, done); });
  *done_bytes = done.load();
  return failure;
}

// 1 on success.
int32_t penstock_test_guarded_copy(void* to, const void* from, size_t bytes) {
  return penstock::guarded_copy(to, from, bytes) ? 1 : 0;
}
int32_t penstock_test_guarded_touch(const void* start, size_t bytes) {
  return penstock::guarded_touch(start, bytes) ? 1 : 0;
}

int32_t penstock_test_register(Driver* driver, const HostFile* file, const int64_t* ends, int64_t count,
                               Registration** out) {
  return to_status([&] { *out = new Registration(*driver, *file, std::vector<size_t>(ends, ends + count)); });
}
void penstock_test_unregister(Registration* registration) { delete registration; }

int32_t penstock_test_staging_create(Driver* driver, const HostFile* file, int64_t buffer_bytes, int32_t buffers,
                                     int32_t threads, Staging** out) {
  return to_status([&] { *out = new Staging(*driver, *file, (size_t)buffer_bytes, buffers, threads); });
}
void penstock_test_staging_destroy(Staging* staging) { delete staging; }
int32_t penstock_test_staging_follow(Staging* staging, const Extent* once, int64_t once_count, const Extent* cycle,
                                     int64_t cycle_count) {
  return to_status([&] {
    staging->follow(std::vector<Extent>(once, once + once_count), std::vector<Extent>(cycle, cycle + cycle_count));
  });
}
int32_t penstock_test_staging_copy_next(Staging* staging, int64_t offset_bytes, int64_t bytes, Address to,
                                        Stream stream) {
  return to_status([&] { staging->copy_next({offset_bytes, bytes}, to, stream); });
}
int32_t penstock_test_staging_copy_now(Staging* staging, int64_t offset_bytes, int64_t bytes, Address to,
                                       Stream stream) {
  return to_status([&] { staging->copy_now(offset_bytes, bytes, to, stream); });
}
int64_t penstock_test_staging_host_bytes(const Staging* staging) { return (int64_t)staging->host_bytes(); }
int64_t penstock_test_staging_bytes_read(const Staging* staging) { return staging->bytes_read(); }

}  // extern "C"
