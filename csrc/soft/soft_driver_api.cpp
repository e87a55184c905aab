// The soft driver over a C interface: to make one, and everything that tests need of it. A function that can fail
// returns the number of its Failure, 0 on success; penstock_soft_error tells more.
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <thread>

#include "soft/soft_driver.h"

namespace penstock {
namespace {

thread_local std::string soft_error;

template <typename Body>
int32_t to_status(Body body) {
  try {
    body();
    return (int32_t)Failure::none;
  } catch (const CoreError& error) {
    soft_error = error.what();
    return (int32_t)error.failure;
  } catch (const std::exception& error) {
    soft_error = error.what();
    return (int32_t)Failure::driver;
  }
}

SoftDriver& soft(Driver* driver) { return *static_cast<SoftDriver*>(driver); }

void sleep_ns(uint64_t ns) {
  if (ns) std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
}

// FNV-1a with 64 bits, over little-endian words of 8 bytes and then over the bytes that are left. Every step is a
// bijection, so that no single changed word goes unseen.
uint64_t hash(const void* start, size_t bytes) {
  constexpr uint64_t kPrime = 0x100000001B3ull;
  uint64_t value = 0xCBF29CE484222325ull;
  const auto* at = static_cast<const unsigned char*>(start);
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    value = (value ^ word) * kPrime;
  }
  for (; bytes; --bytes, ++at) value = (value ^ *at) * kPrime;
  return value;
}

}  // namespace
}  // namespace penstock

using penstock::Address;
using penstock::Block;
using penstock::Driver;
using penstock::Event;
using penstock::Graph;
using penstock::Pool;
using penstock::soft;
using penstock::Stream;
using penstock::to_status;

extern "C" {

// Of the calling thread's last failure.
const char* penstock_soft_error() { return penstock::soft_error.c_str(); }

// Null on failure.
Driver* penstock_soft_create(size_t page_bytes, size_t capacity_bytes, int32_t poison) {
  Driver* driver = nullptr;
  to_status([&] { driver = new penstock::SoftDriver(page_bytes, capacity_bytes, poison != 0); });
  return driver;
}
void penstock_soft_destroy(Driver* driver) { delete driver; }

void penstock_soft_counts(Driver* driver, penstock::SoftCounts* out) { *out = soft(driver).counts(); }
uint64_t penstock_soft_calls(Driver* driver) { return soft(driver).calls().total(); }
// The n-th call from now fails; with `call`, the n-th call of that name. A failure of 0 is the one natural for the
// call; an n of 0 takes the order back.
void penstock_soft_fail_at(Driver* driver, uint64_t n, int32_t failure, const char* call) {
  soft(driver).calls().fail_at(n, (penstock::Failure)failure, call ? call : "");
}
// The call that was made to fail; empty while none was.
const char* penstock_soft_failed_call(Driver* driver) { return soft(driver).calls().failed(); }
void penstock_soft_set_delays(Driver* driver, uint64_t seed, uint64_t max_ns) {
  soft(driver).pace().delays.set(seed, max_ns);
}
// A late stream does nothing until somebody waits for it, and then only what is waited for, after everything that other
// streams can do. So what lacks a wait shows, every time.
int32_t penstock_soft_set_late(Driver* driver, Stream stream, int32_t late) {
  return to_status([&] { soft(driver).set_late(stream, late != 0); });
}
// Until every stream that is not late has nothing left to do, or waits for one that is.
void penstock_soft_rest(Driver* driver) { soft(driver).pace().rest.wait(); }
// From here on the clock moves by one tick for every copy, fill and kernel that has run, and by nothing else.
void penstock_soft_set_clock(Driver* driver, int64_t now_ns, int64_t tick_ns) {
  soft(driver).pace().clock.set(now_ns, tick_ns);
}
void penstock_soft_set_capturing(Driver* driver, Stream stream, int32_t capturing) {
  soft(driver).set_capturing(stream, capturing != 0);
}

// Graphs. On a GPU these are torch's to call, so they are none of the driver's functions.
int32_t penstock_soft_begin_capture(Driver* driver, Stream stream) {
  return to_status([&] { soft(driver).begin_capture(stream); });
}
int32_t penstock_soft_end_capture(Driver* driver, Stream stream, Graph* out) {
  return to_status([&] { *out = soft(driver).end_capture(stream); });
}
int32_t penstock_soft_launch_graph(Driver* driver, Graph graph, Stream stream, int32_t order, uint64_t seed) {
  return to_status([&] { soft(driver).launch_graph(graph, stream, (penstock::SoftOrder)order, seed); });
}
// For launches that say no order, as those of a session.
void penstock_soft_set_order(Driver* driver, int32_t order, uint64_t seed) {
  soft(driver).set_order((penstock::SoftOrder)order, seed);
}
int32_t penstock_soft_destroy_graph(Driver* driver, Graph graph) {
  return to_status([&] { soft(driver).destroy_graph(graph); });
}

// Test kernels.
int32_t penstock_soft_launch_hash(Driver* driver, Stream stream, Address address, size_t bytes, uint64_t* out,
                                  uint64_t delay_ns) {
  return to_status([&] {
    soft(driver).launch(stream, [=] {
      penstock::sleep_ns(delay_ns);
      *out = penstock::hash(reinterpret_cast<const void*>(address), bytes);
    });
  });
}
int32_t penstock_soft_launch_sleep(Driver* driver, Stream stream, uint64_t delay_ns) {
  return to_status([&] { soft(driver).launch(stream, [=] { penstock::sleep_ns(delay_ns); }); });
}
// Any function, in stream order.
int32_t penstock_soft_launch(Driver* driver, Stream stream, void (*body)(void*), void* argument) {
  return to_status([&] { soft(driver).launch(stream, [=] { body(argument); }); });
}

// The driver's own functions.
int32_t penstock_soft_memory_info(Driver* driver, size_t* free_bytes, size_t* total_bytes) {
  return to_status([&] {
    const penstock::MemoryInfo info = driver->memory_info();
    *free_bytes = info.free_bytes;
    *total_bytes = info.total_bytes;
  });
}
int32_t penstock_soft_granularity_bytes(Driver* driver, size_t* out) {
  return to_status([&] { *out = driver->granularity_bytes(); });
}
int32_t penstock_soft_create_block(Driver* driver, size_t bytes, Block* out) {
  return to_status([&] { *out = driver->create_block(bytes); });
}
int32_t penstock_soft_release_block(Driver* driver, Block block) {
  return to_status([&] { driver->release_block(block); });
}
int32_t penstock_soft_reserve(Driver* driver, size_t bytes, Address* out) {
  return to_status([&] { *out = driver->reserve(bytes); });
}
int32_t penstock_soft_unreserve(Driver* driver, Address address, size_t bytes) {
  return to_status([&] { driver->unreserve(address, bytes); });
}
int32_t penstock_soft_map(Driver* driver, Address address, size_t bytes, Block block) {
  return to_status([&] { driver->map(address, bytes, block); });
}
int32_t penstock_soft_allow_access(Driver* driver, Address address, size_t bytes) {
  return to_status([&] { driver->allow_access(address, bytes); });
}
int32_t penstock_soft_unmap(Driver* driver, Address address, size_t bytes) {
  return to_status([&] { driver->unmap(address, bytes); });
}
int32_t penstock_soft_create_pool(Driver* driver, size_t max_bytes, Pool* out) {
  return to_status([&] { *out = driver->create_pool(max_bytes); });
}
int32_t penstock_soft_destroy_pool(Driver* driver, Pool pool) {
  return to_status([&] { driver->destroy_pool(pool); });
}
int32_t penstock_soft_pool_allocate(Driver* driver, Pool pool, size_t bytes, Stream stream, Address* out) {
  return to_status([&] { *out = driver->pool_allocate(pool, bytes, stream); });
}
int32_t penstock_soft_pool_release(Driver* driver, Pool pool, Address address, Stream stream) {
  return to_status([&] { driver->pool_release(pool, address, stream); });
}
int32_t penstock_soft_pool_peak_bytes(Driver* driver, Pool pool, size_t* out) {
  return to_status([&] { *out = driver->pool_peak_bytes(pool); });
}
int32_t penstock_soft_create_stream(Driver* driver, Stream* out) {
  return to_status([&] { *out = driver->create_stream(); });
}
int32_t penstock_soft_destroy_stream(Driver* driver, Stream stream) {
  return to_status([&] { driver->destroy_stream(stream); });
}
int32_t penstock_soft_synchronize_stream(Driver* driver, Stream stream) {
  return to_status([&] { driver->synchronize_stream(stream); });
}
int32_t penstock_soft_is_capturing(Driver* driver, Stream stream, int32_t* out) {
  return to_status([&] { *out = driver->is_capturing(stream); });
}
int32_t penstock_soft_create_event(Driver* driver, int32_t timing, Event* out) {
  return to_status([&] { *out = driver->create_event(timing != 0); });
}
int32_t penstock_soft_destroy_event(Driver* driver, Event event) {
  return to_status([&] { driver->destroy_event(event); });
}
int32_t penstock_soft_record(Driver* driver, Event event, Stream stream) {
  return to_status([&] { driver->record(event, stream); });
}
int32_t penstock_soft_wait(Driver* driver, Stream stream, Event event) {
  return to_status([&] { driver->wait(stream, event); });
}
int32_t penstock_soft_record_external(Driver* driver, Event event, Stream stream) {
  return to_status([&] { driver->record_external(event, stream); });
}
int32_t penstock_soft_wait_external(Driver* driver, Stream stream, Event event) {
  return to_status([&] { driver->wait_external(stream, event); });
}
int32_t penstock_soft_synchronize_event(Driver* driver, Event event) {
  return to_status([&] { driver->synchronize_event(event); });
}
int32_t penstock_soft_is_complete(Driver* driver, Event event, int32_t* out) {
  return to_status([&] { *out = driver->is_complete(event); });
}
int32_t penstock_soft_elapsed_ns(Driver* driver, Event from, Event to, int64_t* out) {
  return to_status([&] { *out = driver->elapsed_ns(from, to); });
}
int32_t penstock_soft_copy_to_device(Driver* driver, Address to, const void* from, size_t bytes, Stream stream) {
  return to_status([&] { driver->copy_to_device(to, from, bytes, stream); });
}
int32_t penstock_soft_copy_to_host(Driver* driver, void* to, Address from, size_t bytes, Stream stream) {
  return to_status([&] { driver->copy_to_host(to, from, bytes, stream); });
}
int32_t penstock_soft_fill(Driver* driver, Address to, int32_t value, size_t bytes, Stream stream) {
  return to_status([&] { driver->fill(to, (unsigned char)value, bytes, stream); });
}
int32_t penstock_soft_register_host(Driver* driver, const void* start, size_t bytes) {
  return to_status([&] { driver->register_host(start, bytes); });
}
int32_t penstock_soft_unregister_host(Driver* driver, const void* start) {
  return to_status([&] { driver->unregister_host(start); });
}
int32_t penstock_soft_host_address(Driver* driver, const void* start, size_t bytes, Address* out) {
  return to_status([&] { *out = driver->host_address(start, bytes); });
}
int32_t penstock_soft_allocate_host(Driver* driver, size_t bytes, void** out) {
  return to_status([&] { *out = driver->allocate_host(bytes); });
}
int32_t penstock_soft_free_host(Driver* driver, void* start) {
  return to_status([&] { driver->free_host(start); });
}

}  // extern "C"
