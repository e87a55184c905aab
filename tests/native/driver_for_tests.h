// A driver over any other, for tests: it counts the calls, makes one of them fail, and says that a stream is captured
// where it is not. It is in no library that is shipped; tests/native/library.py builds it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "driver/driver.h"

namespace penstock {

class CallCount {
 public:
  // The countdown-th call from now fails, counting only calls named `only` unless that is empty. Failure::none means
  // the failure that is natural for the call. A countdown of 0 takes the order back.
  void fail_at(uint64_t countdown, Failure failure, const std::string& only);

  // For calls that make or use something: nothing has been done when this throws.
  void count(const char* call, Failure natural = Failure::driver);

  // For calls that are no part of the total, and fail only when they are asked for by name.
  void count_if_named(const char* call);

  // For calls that give something back: these release first and report afterwards, as a failing destroy does, so that
  // counters of what is alive tell leaks from failures.
  class Late {
   public:
    Late(CallCount& calls, const char* call) : call_(call) { calls.due(call, Failure::driver, &failure_); }
    bool fails() const { return failure_ != Failure::none; }
    void report() const;

   private:
    const char* call_;
    Failure failure_ = Failure::none;
  };

  uint64_t total() const;
  // The name of the call that was made to fail; empty while none was.
  const char* failed() const;

 private:
  bool due(const char* call, Failure natural, Failure* out);
  bool take(const char* call, Failure natural, Failure* out);

  mutable std::mutex mutex_;
  uint64_t total_ = 0;
  uint64_t countdown_ = 0;
  Failure failure_ = Failure::none;
  std::string only_;
  const char* failed_ = "";
};

class TestDriver final : public Driver {
 public:
  explicit TestDriver(std::unique_ptr<Driver> wrapped) : wrapped_(std::move(wrapped)) {}

  Driver& wrapped() { return *wrapped_; }
  CallCount& calls() { return calls_; }
  // Only what is_capturing says: the work of the stream is done all the same.
  void set_capturing(Stream stream, bool capturing);
  // As a GPU of that number has it: registering a file with it may hang.
  void set_probed_device(int32_t device_index) { probed_device_ = device_index; }

  // A device that cannot be entered is gone, and with it all that it held: this must be asked for by name.
  void enter() override;
  void leave() noexcept override;
  MemoryInfo memory_info() override;
  int32_t probed_device() const override { return probed_device_.value_or(wrapped_->probed_device()); }

  size_t granularity_bytes() override;
  Block create_block(size_t bytes) override;
  void release_block(Block block) override;
  Address reserve(size_t bytes) override;
  void unreserve(Address address, size_t bytes) override;
  void map(Address address, size_t bytes, Block block) override;
  void allow_access(Address address, size_t bytes) override;
  void unmap(Address address, size_t bytes) override;

  size_t pool_unit_bytes() override;
  Pool create_pool(size_t max_bytes) override;
  void destroy_pool(Pool pool) override;
  Address pool_allocate(Pool pool, size_t bytes, Stream stream) override;
  void pool_release(Pool pool, Address address, Stream stream) override;
  size_t pool_peak_bytes(Pool pool) override;

  Stream create_stream() override;
  void destroy_stream(Stream stream) override;
  void synchronize_stream(Stream stream) override;
  bool is_capturing(Stream stream) override;

  Event create_event(bool timing) override;
  void destroy_event(Event event) override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void record_external(Event event, Stream stream) override;
  void wait_external(Stream stream, Event event) override;

  void begin_capture(Stream stream) override;
  Graph end_capture(Stream stream) override;
  void launch_graph(Graph graph, Stream stream) override;
  void destroy_graph(Graph graph) override;

  void synchronize_event(Event event) override;
  bool is_complete(Event event) override;
  int64_t elapsed_ns(Event from, Event to) override;

  void copy_to_device(Address to, const void* from, size_t bytes, Stream stream) override;
  void copy_to_host(void* to, Address from, size_t bytes, Stream stream) override;
  void fill(Address to, unsigned char value, size_t bytes, Stream stream) override;

  void launch_linear(const LinearRecipe& recipe, const LinearCall& call, Stream stream) override;
  void prepare_decoding() override;
  void decode(const DecodeCall& call, Stream stream) override;
  void prepare_experts() override;
  void choose_experts(const ChooseCall& call, Stream stream) override;
  void move_experts(const MoveCall& call, Stream stream) override;
  void shift_rows(const ShiftCall& call, Stream stream) override;

  void register_host(const void* start, size_t bytes) override;
  void unregister_host(const void* start) override;
  Address host_address(const void* start, size_t bytes) override;
  void* allocate_host(size_t bytes) override;
  void free_host(void* start) override;

 private:
  CallCount calls_;
  const std::unique_ptr<Driver> wrapped_;
  std::optional<int32_t> probed_device_;
  std::mutex mutex_;  // of what follows
  std::set<Stream> capturing_;
};

}  // namespace penstock
