// Any driver over a C interface, and the driver that wraps one.
#include "status.h"
#include "driver_for_tests.h"

using penstock::Address;
using penstock::Block;
using penstock::Driver;
using penstock::Event;
using penstock::Graph;
using penstock::Pool;
using penstock::Stream;
using penstock::TestDriver;
using penstock::to_status;

namespace {
TestDriver& test(Driver* driver) { return *static_cast<TestDriver*>(driver); }
}  // namespace

extern "C" {

const char* penstock_test_error() { return penstock::test_error.c_str(); }

// Owns what it wraps from here on. It is destroyed as any driver is.
Driver* penstock_test_wrap(Driver* wrapped) { return new TestDriver(std::unique_ptr<Driver>(wrapped)); }
// As a GPU, with which registering a file is tried first in a process of its own.
Driver* penstock_test_wrap_gpu(Driver* wrapped) {
  auto* made = new TestDriver(std::unique_ptr<Driver>(wrapped));
  made->set_probed_device(1);
  return made;
}
// Null of a driver that wraps none; what follows down to the table must not be asked of it.
Driver* penstock_test_wrapped(Driver* driver) {
  auto* found = dynamic_cast<TestDriver*>(driver);
  return found ? &found->wrapped() : nullptr;
}

uint64_t penstock_test_calls(Driver* driver) { return test(driver).calls().total(); }
// The n-th call from now fails; with `call`, the n-th call of that name. A failure of 0 is the one natural for the
// call; an n of 0 takes the order back.
void penstock_test_fail_at(Driver* driver, uint64_t n, int32_t failure, const char* call) {
  test(driver).calls().fail_at(n, (penstock::Failure)failure, call ? call : "");
}
// The call that was made to fail; empty while none was.
const char* penstock_test_failed_call(Driver* driver) { return test(driver).calls().failed(); }
void penstock_test_set_capturing(Driver* driver, Stream stream, int32_t capturing) {
  test(driver).set_capturing(stream, capturing != 0);
}

void penstock_test_set_probed_device(Driver* driver, int32_t device_index) {
  test(driver).set_probed_device(device_index);
}

// The driver's own functions.
int32_t penstock_test_memory_info(Driver* driver, size_t* free_bytes, size_t* total_bytes) {
  return to_status([&] {
    const penstock::MemoryInfo info = driver->memory_info();
    *free_bytes = info.free_bytes;
    *total_bytes = info.total_bytes;
  });
}
int32_t penstock_test_granularity_bytes(Driver* driver, size_t* out) {
  return to_status([&] { *out = driver->granularity_bytes(); });
}
int32_t penstock_test_create_block(Driver* driver, size_t bytes, Block* out) {
  return to_status([&] { *out = driver->create_block(bytes); });
}
int32_t penstock_test_release_block(Driver* driver, Block block) {
  return to_status([&] { driver->release_block(block); });
}
int32_t penstock_test_reserve(Driver* driver, size_t bytes, Address* out) {
  return to_status([&] { *out = driver->reserve(bytes); });
}
int32_t penstock_test_unreserve(Driver* driver, Address address, size_t bytes) {
  return to_status([&] { driver->unreserve(address, bytes); });
}
int32_t penstock_test_map(Driver* driver, Address address, size_t bytes, Block block) {
  return to_status([&] { driver->map(address, bytes, block); });
}
int32_t penstock_test_allow_access(Driver* driver, Address address, size_t bytes) {
  return to_status([&] { driver->allow_access(address, bytes); });
}
int32_t penstock_test_unmap(Driver* driver, Address address, size_t bytes) {
  return to_status([&] { driver->unmap(address, bytes); });
}
int32_t penstock_test_create_pool(Driver* driver, size_t max_bytes, Pool* out) {
  return to_status([&] { *out = driver->create_pool(max_bytes); });
}
int32_t penstock_test_destroy_pool(Driver* driver, Pool pool) {
  return to_status([&] { driver->destroy_pool(pool); });
}
int32_t penstock_test_pool_allocate(Driver* driver, Pool pool, size_t bytes, Stream stream, Address* out) {
  return to_status([&] { *out = driver->pool_allocate(pool, bytes, stream); });
}
int32_t penstock_test_pool_release(Driver* driver, Pool pool, Address address, Stream stream) {
  return to_status([&] { driver->pool_release(pool, address, stream); });
}
int32_t penstock_test_pool_peak_bytes(Driver* driver, Pool pool, size_t* out) {
  return to_status([&] { *out = driver->pool_peak_bytes(pool); });
}
int32_t penstock_test_create_stream(Driver* driver, Stream* out) {
  return to_status([&] { *out = driver->create_stream(); });
}
int32_t penstock_test_destroy_stream(Driver* driver, Stream stream) {
  return to_status([&] { driver->destroy_stream(stream); });
}
int32_t penstock_test_synchronize_stream(Driver* driver, Stream stream) {
  return to_status([&] { driver->synchronize_stream(stream); });
}
int32_t penstock_test_is_capturing(Driver* driver, Stream stream, int32_t* out) {
  return to_status([&] { *out = driver->is_capturing(stream); });
}
int32_t penstock_test_create_event(Driver* driver, int32_t timing, Event* out) {
  return to_status([&] { *out = driver->create_event(timing != 0); });
}
int32_t penstock_test_destroy_event(Driver* driver, Event event) {
  return to_status([&] { driver->destroy_event(event); });
}
int32_t penstock_test_record(Driver* driver, Event event, Stream stream) {
  return to_status([&] { driver->record(event, stream); });
}
int32_t penstock_test_wait(Driver* driver, Stream stream, Event event) {
  return to_status([&] { driver->wait(stream, event); });
}
int32_t penstock_test_record_external(Driver* driver, Event event, Stream stream) {
  return to_status([&] { driver->record_external(event, stream); });
}
int32_t penstock_test_wait_external(Driver* driver, Stream stream, Event event) {
  return to_status([&] { driver->wait_external(stream, event); });
}
int32_t penstock_test_synchronize_event(Driver* driver, Event event) {
  return to_status([&] { driver->synchronize_event(event); });
}
int32_t penstock_test_is_complete(Driver* driver, Event event, int32_t* out) {
  return to_status([&] { *out = driver->is_complete(event); });
}
int32_t penstock_test_elapsed_ns(Driver* driver, Event from, Event to, int64_t* out) {
  return to_status([&] { *out = driver->elapsed_ns(from, to); });
}
int32_t penstock_test_copy_to_device(Driver* driver, Address to, const void* from, size_t bytes, Stream stream) {
  return to_status([&] { driver->copy_to_device(to, from, bytes, stream); });
}
int32_t penstock_test_copy_to_host(Driver* driver, void* to, Address from, size_t bytes, Stream stream) {
  return to_status([&] { driver->copy_to_host(to, from, bytes, stream); });
}
int32_t penstock_test_fill(Driver* driver, Address to, int32_t value, size_t bytes, Stream stream) {
  return to_status([&] { driver->fill(to, (unsigned char)value, bytes, stream); });
}
int32_t penstock_test_register_host(Driver* driver, const void* start, size_t bytes) {
  return to_status([&] { driver->register_host(start, bytes); });
}
int32_t penstock_test_unregister_host(Driver* driver, const void* start) {
  return to_status([&] { driver->unregister_host(start); });
}
int32_t penstock_test_host_address(Driver* driver, const void* start, size_t bytes, Address* out) {
  return to_status([&] { *out = driver->host_address(start, bytes); });
}
int32_t penstock_test_allocate_host(Driver* driver, size_t bytes, void** out) {
  return to_status([&] { *out = driver->allocate_host(bytes); });
}
int32_t penstock_test_free_host(Driver* driver, void* start) {
  return to_status([&] { driver->free_host(start); });
}
int32_t penstock_test_begin_capture(Driver* driver, Stream stream) {
  return to_status([&] { driver->begin_capture(stream); });
}
int32_t penstock_test_end_capture(Driver* driver, Stream stream, Graph* out) {
  return to_status([&] { *out = driver->end_capture(stream); });
}
int32_t penstock_test_destroy_graph(Driver* driver, Graph graph) {
  return to_status([&] { driver->destroy_graph(graph); });
}

}  // extern "C"
