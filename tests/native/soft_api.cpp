// What tests ask of a soft driver beyond the table: what is alive in it, its pace and orders, and test kernels.
#include <chrono>
#include <cstring>
#include <thread>

#include "capturing_driver.h"
#include "status.h"

namespace penstock {
namespace {

// Ends the process where it is none: a driver that wraps one must be unwrapped first.
SoftDriver& soft(Driver* driver) noexcept { return dynamic_cast<SoftDriver&>(*driver); }
CapturingDriver& capturing(Driver* driver) noexcept { return dynamic_cast<CapturingDriver&>(*driver); }

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
using penstock::capturing;
using penstock::CapturingDriver;
using penstock::Driver;
using penstock::Graph;
using penstock::soft;
using penstock::Stream;
using penstock::to_status;

extern "C" {

// One that captures, as tests make it; a module opens one that does not.
penstock::Driver* penstock_soft_create_capturing(size_t page_bytes, size_t capacity_bytes, int32_t poison) {
  penstock::Driver* made = nullptr;
  to_status([&] { made = new CapturingDriver(page_bytes, capacity_bytes, poison != 0); });
  return made;
}

struct Counts {
  penstock::SoftCounts of_driver;
  int64_t graphs;
};
void penstock_soft_counts(Driver* driver, Counts* out) {
  auto* capturing = dynamic_cast<CapturingDriver*>(driver);
  *out = {soft(driver).counts(), capturing ? capturing->graphs() : 0};
}
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

// In an order that the captured edges allow.
int32_t penstock_soft_launch_graph(Driver* driver, Graph graph, Stream stream, int32_t order, uint64_t seed) {
  return to_status([&] { capturing(driver).launch_graph(graph, stream, (penstock::SoftOrder)order, seed); });
}
// For launches that say no order, as those of a session.
void penstock_soft_set_order(Driver* driver, int32_t order, uint64_t seed) {
  capturing(driver).set_order((penstock::SoftOrder)order, seed);
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

}  // extern "C"
