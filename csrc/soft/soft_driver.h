// The driver of a machine without a GPU: streams are threads, device memory is pages that several ranges can map,
// events are real. A null Stream is the calling thread itself: its work is done when the call returns.
//
// A copy whose source cannot be read fails its stream for good. Work queued there is skipped, and whoever observes the
// stream (synchronizes, waits inline, queries an event), directly or through other streams, gets the error.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "driver/driver.h"
#include "soft/soft_host.h"
#include "soft/soft_memory.h"
#include "soft/soft_pool.h"
#include "soft/soft_stream.h"

namespace penstock {

// How many objects of each kind are alive. The layout is part of the C interface.
struct SoftCounts {
  int64_t blocks;
  int64_t block_bytes;
  int64_t peak_block_bytes;
  int64_t ranges;
  int64_t mappings;
  int64_t streams;
  int64_t events;
  int64_t pools;
  int64_t pool_allocations;
  int64_t pool_bytes;
  int64_t registrations;
  int64_t registered_bytes;
  int64_t host_allocations;
  int64_t host_bytes;
  int64_t peak_host_bytes;
};

// A program on the CPU has no graphs, so nothing can be captured here. Tests have a driver on top of this one that
// captures: tests/native/capturing_driver.h.
class SoftDriver : public Driver {
 public:
  // A capacity of 0 sets no limit of our own. With poison, fresh and released device bytes read as 0xFF.
  SoftDriver(size_t granularity_bytes, size_t capacity_bytes, bool poison);
  ~SoftDriver() override;

  MemoryInfo memory_info() override;

  size_t granularity_bytes() override;
  Block create_block(size_t bytes) override;
  void release_block(Block block) override;
  Address reserve(size_t bytes) override;
  void unreserve(Address address, size_t bytes) override;
  void map(Address address, size_t bytes, Block block) override;
  void allow_access(Address address, size_t bytes) override;
  void unmap(Address address, size_t bytes) override;

  Pool create_pool(size_t max_bytes) override;
  void destroy_pool(Pool pool) override;
  // Bytes that another stream has released count as taken until that stream has reached the release. This does not wait
  // for them, but fails with Failure::device_memory.
  Address pool_allocate(Pool pool, size_t bytes, Stream stream) override;
  void pool_release(Pool pool, Address address, Stream stream) override;
  size_t pool_peak_bytes(Pool pool) override;

  Stream create_stream() override;
  void destroy_stream(Stream stream) override;
  void synchronize_stream(Stream stream) override;
  bool is_capturing(Stream) override { return false; }

  Event create_event(bool timing) override;
  void destroy_event(Event event) override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void record_external(Event event, Stream stream) override { record(event, stream); }
  void wait_external(Stream stream, Event event) override { wait(stream, event); }
  void synchronize_event(Event event) override;
  bool is_complete(Event event) override;
  int64_t elapsed_ns(Event from, Event to) override;

  void copy_to_device(Address to, const void* from, size_t bytes, Stream stream) override;
  void copy_to_host(void* to, Address from, size_t bytes, Stream stream) override;
  void fill(Address to, unsigned char value, size_t bytes, Stream stream) override;

  void decode(const DecodeCall& call, Stream stream) override;

  void choose_experts(const ChooseCall& call, Stream stream) override;
  void move_experts(const MoveCall& call, Stream stream) override;

  void register_host(const void* start, size_t bytes) override;
  void unregister_host(const void* start) override;
  Address host_address(const void* start, size_t bytes) override;
  void* allocate_host(size_t bytes) override;
  void free_host(void* start) override;

  void begin_capture(Stream) override { refuse_graph(); }
  Graph end_capture(Stream) override { refuse_graph(); }
  void launch_graph(Graph, Stream) override { refuse_graph(); }
  void destroy_graph(Graph) override { refuse_graph(); }

  // The rest is for tests: what only the inside of a driver can tell or force. Everything else that they need is in
  // tests/native.

  // A kernel: runs in stream order.
  void launch(Stream stream, std::function<void()> body);
  SoftCounts counts() const;
  SoftPace& pace() { return pace_; }
  void set_late(Stream stream, bool late);

 protected:
  enum class Work { copy, kernel };
  // Whether a derived driver has taken a piece of work on this stream, which then must not run here.
  virtual bool captured(Stream, const char*, Work, const std::function<void()>&) { return false; }
  // Must be called before anything that their work uses goes.
  void finish_streams();
  std::shared_ptr<SoftEvent> event_of(Event event, const char* call) const;
  // Null for a null Stream, the calling thread itself.
  std::shared_ptr<SoftStream> queue_of(Stream stream, const char* call) const;

 private:
  [[noreturn]] static void refuse_graph() {
    throw CoreError(Failure::capture, "nothing can be captured: a program on the CPU has no graphs");
  }
  // One lock over both halves of a release, so that no allocation on the same stream slips in between.
  struct PoolEntry {
    PoolEntry(size_t max_bytes, bool poison, SoftCapacity& capacity) : pool(max_bytes, poison, capacity) {}
    std::mutex mutex;
    SoftPool pool;
  };

  template <typename Thing>
  std::shared_ptr<Thing> find(const std::map<void*, std::shared_ptr<Thing>>& things, void* handle, const char* call,
                              const char* kind) const;
  template <typename Thing>
  std::shared_ptr<Thing> take(std::map<void*, std::shared_ptr<Thing>>& things, void* handle, const char* call,
                              const char* kind);
  std::shared_ptr<SoftStream> stream_of(Stream stream, const char* call) const;
  void enqueue(Stream stream, const char* call, Work kind, std::function<void()> body);

  SoftPace pace_;
  SoftCapacity capacity_;
  SoftMemory memory_;
  SoftHost host_;
  const bool poison_;
  mutable std::mutex mutex_;  // of the tables below
  std::map<void*, std::shared_ptr<SoftEvent>> events_;
  std::map<void*, std::shared_ptr<PoolEntry>> pools_;
  std::map<void*, std::shared_ptr<SoftStream>> streams_;
};

}  // namespace penstock
