// What the core asks of a driver: virtual memory, pools, streams, events, copies, host memory. There are two:
// libcuda.so.1 and the soft driver. The session uses this table alone, so what CI proves on one holds on the other.
//
// Every function throws DriverError on failure. A failure must not keep the rest from being given back: when the
// session cleans up, it calls each function that gives something back through quietly().
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "penstock_core.h"

namespace penstock {

class CoreError : public std::runtime_error {
 public:
  CoreError(Failure failure, const std::string& message) : std::runtime_error(message), failure(failure) {}
  const Failure failure;
};

class DriverError final : public CoreError {
 public:
  // `call` is the driver function's own name, `code` its result.
  DriverError(Failure failure, const std::string& call, int code, const std::string& text)
      : CoreError(failure, call + " failed: " + text + " (" + std::to_string(code) + ")"), code(code) {}
  const int code;
};

struct LinearRecipe;
struct LinearCall;
struct DecodeCall;
struct ChooseCall;
struct MoveCall;
struct ShiftCall;

// What unwritten device bytes hold where poison is asked for: NaN in every float format.
constexpr unsigned char kPoison = 0xFF;

using Address = uint64_t;  // a device address
using Block = uint64_t;    // physical device memory
using Pool = void*;
using Stream = void*;
using Event = void*;
using Graph = void*;

struct MemoryInfo {
  size_t free_bytes;
  size_t total_bytes;
};

class Driver {
 public:
  virtual ~Driver() = default;

  // enter makes the driver's device current on the calling thread; leave restores the previous one. Paired, nestable.
  virtual void enter() {}
  virtual void leave() noexcept {}

  virtual MemoryInfo memory_info() = 0;

  // The number of the device with which to try registering a file first, in a separate process. -1: it cannot hang.
  virtual int32_t probed_device() const { return -1; }

  // Physical memory, in multiples of the granularity; one block may be mapped into several ranges.
  virtual size_t granularity_bytes() = 0;
  virtual Block create_block(size_t bytes) = 0;
  virtual void release_block(Block block) = 0;
  virtual Address reserve(size_t bytes) = 0;
  virtual void unreserve(Address address, size_t bytes) = 0;
  // Maps the whole block.
  virtual void map(Address address, size_t bytes, Block block) = 0;
  virtual void allow_access(Address address, size_t bytes) = 0;
  virtual void unmap(Address address, size_t bytes) = 0;

  // A pool never holds more than max_bytes, which must be a multiple of the unit in which it takes memory. Allocation
  // and release are stream-ordered.
  virtual size_t pool_unit_bytes() { return granularity_bytes(); }
  virtual Pool create_pool(size_t max_bytes) = 0;
  virtual void destroy_pool(Pool pool) = 0;
  virtual Address pool_allocate(Pool pool, size_t bytes, Stream stream) = 0;
  virtual void pool_release(Pool pool, Address address, Stream stream) = 0;
  // The most physical bytes the pool has held.
  virtual size_t pool_peak_bytes(Pool pool) = 0;

  virtual Stream create_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;
  virtual void synchronize_stream(Stream stream) = 0;
  virtual bool is_capturing(Stream stream) = 0;

  virtual Event create_event(bool timing) = 0;
  virtual void destroy_event(Event event) = 0;
  virtual void record(Event event, Stream stream) = 0;
  // The stream waits for the event's last recording before this call. An event that was never recorded is no wait.
  virtual void wait(Stream stream, Event event) = 0;
  // While a stream is captured, record and wait make edges inside the graph. These two make nodes that are visible
  // outside it: each launch records the event anew, or waits for its last recording before that launch. On a stream
  // that is not captured they are the same as record and wait.
  virtual void record_external(Event event, Stream stream) = 0;
  virtual void wait_external(Stream stream, Event event) = 0;

  // Between begin and end, work on the stream, and on streams that wait for its events, does not run but becomes a
  // graph. If end throws, no stream is captured any more. A graph may be destroyed while it runs.
  virtual void begin_capture(Stream stream) = 0;
  virtual Graph end_capture(Stream stream) = 0;
  virtual void launch_graph(Graph graph, Stream stream) = 0;
  virtual void destroy_graph(Graph graph) = 0;

  virtual void synchronize_event(Event event) = 0;
  virtual bool is_complete(Event event) = 0;
  // Both events must have been recorded with timing, and be complete.
  virtual int64_t elapsed_ns(Event from, Event to) = 0;

  virtual void copy_to_device(Address to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void copy_to_host(void* to, Address from, size_t bytes, Stream stream) = 0;
  virtual void fill(Address to, unsigned char value, size_t bytes, Stream stream) = 0;

  // Launches the kernel of a linear in stream order.
  virtual void launch_linear(const LinearRecipe&, const LinearCall&, Stream) {
    throw CoreError(Failure::usage, "the soft driver launches no kernels: a linear was prepared for a GPU");
  }

  // Sets up everything that decoding needs, because decode itself may be captured.
  virtual void prepare_decoding() {}
  virtual void decode(const DecodeCall& call, Stream stream) = 0;

  // Experts in slots (csrc/experts). The first function sets up what the others need, because those may be captured.
  virtual void prepare_experts() {}
  virtual void choose_experts(const ChooseCall& call, Stream stream) = 0;
  virtual void move_experts(const MoveCall& call, Stream stream) = 0;
  virtual void shift_rows(const ShiftCall&, Stream) {
    throw CoreError(Failure::usage, "the soft driver shifts no rows: products of groups are made on the calling thread");
  }

  // Read-only registration of memory that exists, and allocation of pinned memory.
  virtual void register_host(const void* start, size_t bytes) = 0;
  virtual void unregister_host(const void* start) = 0;
  // The address at which kernels read registered memory in place.
  virtual Address host_address(const void* start, size_t bytes) = 0;
  virtual void* allocate_host(size_t bytes) = 0;
  virtual void free_host(void* start) = 0;
};

}  // namespace penstock
