// What fails when, and every call handed on.
#include "driver_for_tests.h"

#include <cerrno>

#include "driver/cleanup.h"

namespace penstock {
namespace {

[[noreturn]] void throw_injected(const char* call, Failure failure) {
  throw DriverError(failure, call, ECANCELED, "a test asked for this failure");
}

}  // namespace

void CallCount::fail_at(uint64_t countdown, Failure failure, const std::string& only) {
  std::lock_guard<std::mutex> lock(mutex_);
  countdown_ = countdown;
  failure_ = failure;
  only_ = only;
  failed_ = "";
}

void CallCount::count(const char* call, Failure natural) {
  Failure failure = Failure::none;
  if (due(call, natural, &failure)) throw_injected(call, failure);
}

void CallCount::count_if_named(const char* call) {
  Failure failure = Failure::none;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (only_ != call || !take(call, Failure::driver, &failure)) return;
  }
  throw_injected(call, failure);
}

void CallCount::Late::report() const {
  if (fails()) throw_injected(call_, failure_);
}

uint64_t CallCount::total() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

const char* CallCount::failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_;
}

bool CallCount::due(const char* call, Failure natural, Failure* out) {
  std::lock_guard<std::mutex> lock(mutex_);
  total_++;
  return (only_.empty() || only_ == call) && take(call, natural, out);
}

bool CallCount::take(const char* call, Failure natural, Failure* out) {
  if (countdown_ == 0 || --countdown_ != 0) return false;
  failed_ = call;
  *out = failure_ == Failure::none ? natural : failure_;
  return true;
}

void TestDriver::set_capturing(Stream stream, bool capturing) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capturing)
    capturing_.insert(stream);
  else
    capturing_.erase(stream);
}

void TestDriver::enter() {
  calls_.count_if_named("enter");
  wrapped_->enter();
}

void TestDriver::leave() noexcept { wrapped_->leave(); }

MemoryInfo TestDriver::memory_info() {
  calls_.count("memory_info");
  return wrapped_->memory_info();
}

size_t TestDriver::granularity_bytes() {
  calls_.count("granularity_bytes");
  return wrapped_->granularity_bytes();
}

Block TestDriver::create_block(size_t bytes) {
  calls_.count("create_block", Failure::device_memory);
  return wrapped_->create_block(bytes);
}

void TestDriver::release_block(Block block) {
  const CallCount::Late late(calls_, "release_block");
  wrapped_->release_block(block);
  late.report();
}

Address TestDriver::reserve(size_t bytes) {
  calls_.count("reserve");
  return wrapped_->reserve(bytes);
}

void TestDriver::unreserve(Address address, size_t bytes) {
  const CallCount::Late late(calls_, "unreserve");
  wrapped_->unreserve(address, bytes);
  late.report();
}

void TestDriver::map(Address address, size_t bytes, Block block) {
  calls_.count("map");
  wrapped_->map(address, bytes, block);
}

void TestDriver::allow_access(Address address, size_t bytes) {
  calls_.count("allow_access");
  wrapped_->allow_access(address, bytes);
}

void TestDriver::unmap(Address address, size_t bytes) {
  const CallCount::Late late(calls_, "unmap");
  wrapped_->unmap(address, bytes);
  late.report();
}

size_t TestDriver::pool_unit_bytes() {
  calls_.count("pool_unit_bytes");
  return wrapped_->pool_unit_bytes();
}

Pool TestDriver::create_pool(size_t max_bytes) {
  calls_.count("create_pool", Failure::device_memory);
  return wrapped_->create_pool(max_bytes);
}

void TestDriver::destroy_pool(Pool pool) {
  const CallCount::Late late(calls_, "destroy_pool");
  wrapped_->destroy_pool(pool);
  late.report();
}

Address TestDriver::pool_allocate(Pool pool, size_t bytes, Stream stream) {
  calls_.count("pool_allocate", Failure::device_memory);
  return wrapped_->pool_allocate(pool, bytes, stream);
}

void TestDriver::pool_release(Pool pool, Address address, Stream stream) {
  const CallCount::Late late(calls_, "pool_release");
  wrapped_->pool_release(pool, address, stream);
  late.report();
}

size_t TestDriver::pool_peak_bytes(Pool pool) {
  calls_.count("pool_peak_bytes");
  return wrapped_->pool_peak_bytes(pool);
}

Stream TestDriver::create_stream() {
  calls_.count("create_stream");
  return wrapped_->create_stream();
}

void TestDriver::destroy_stream(Stream stream) {
  const CallCount::Late late(calls_, "destroy_stream");
  wrapped_->destroy_stream(stream);
  set_capturing(stream, false);
  late.report();
}

void TestDriver::synchronize_stream(Stream stream) {
  calls_.count("synchronize_stream");
  wrapped_->synchronize_stream(stream);
}

bool TestDriver::is_capturing(Stream stream) {
  calls_.count("is_capturing");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (capturing_.count(stream)) return true;
  }
  return wrapped_->is_capturing(stream);
}

Event TestDriver::create_event(bool timing) {
  calls_.count("create_event");
  return wrapped_->create_event(timing);
}

void TestDriver::destroy_event(Event event) {
  const CallCount::Late late(calls_, "destroy_event");
  wrapped_->destroy_event(event);
  late.report();
}

void TestDriver::record(Event event, Stream stream) {
  calls_.count("record");
  wrapped_->record(event, stream);
}

void TestDriver::wait(Stream stream, Event event) {
  calls_.count("wait");
  wrapped_->wait(stream, event);
}

void TestDriver::record_external(Event event, Stream stream) {
  calls_.count("record_external");
  wrapped_->record_external(event, stream);
}

void TestDriver::wait_external(Stream stream, Event event) {
  calls_.count("wait_external");
  wrapped_->wait_external(stream, event);
}

void TestDriver::begin_capture(Stream stream) {
  calls_.count("begin_capture");
  wrapped_->begin_capture(stream);
}

Graph TestDriver::end_capture(Stream stream) {
  const CallCount::Late late(calls_, "end_capture");
  Graph graph = wrapped_->end_capture(stream);
  // Of an end that throws there is no graph.
  if (late.fails()) quietly([&] { wrapped_->destroy_graph(graph); });
  late.report();
  return graph;
}

void TestDriver::launch_graph(Graph graph, Stream stream) {
  calls_.count("launch_graph");
  wrapped_->launch_graph(graph, stream);
}

void TestDriver::destroy_graph(Graph graph) {
  const CallCount::Late late(calls_, "destroy_graph");
  wrapped_->destroy_graph(graph);
  late.report();
}

void TestDriver::synchronize_event(Event event) {
  calls_.count("synchronize_event");
  wrapped_->synchronize_event(event);
}

bool TestDriver::is_complete(Event event) {
  calls_.count("is_complete");
  return wrapped_->is_complete(event);
}

int64_t TestDriver::elapsed_ns(Event from, Event to) {
  calls_.count("elapsed_ns");
  return wrapped_->elapsed_ns(from, to);
}

void TestDriver::copy_to_device(Address to, const void* from, size_t bytes, Stream stream) {
  calls_.count("copy_to_device");
  wrapped_->copy_to_device(to, from, bytes, stream);
}

void TestDriver::copy_to_host(void* to, Address from, size_t bytes, Stream stream) {
  calls_.count("copy_to_host");
  wrapped_->copy_to_host(to, from, bytes, stream);
}

void TestDriver::fill(Address to, unsigned char value, size_t bytes, Stream stream) {
  calls_.count("fill");
  wrapped_->fill(to, value, bytes, stream);
}

void TestDriver::launch_linear(const LinearRecipe& recipe, const LinearCall& call, Stream stream) {
  calls_.count("launch_linear");
  wrapped_->launch_linear(recipe, call, stream);
}

void TestDriver::prepare_decoding() {
  calls_.count("prepare_decoding");
  wrapped_->prepare_decoding();
}

void TestDriver::prepare_experts() {
  calls_.count("prepare_experts");
  wrapped_->prepare_experts();
}

void TestDriver::choose_experts(const ChooseCall& call, Stream stream) {
  calls_.count("choose_experts");
  wrapped_->choose_experts(call, stream);
}

void TestDriver::move_experts(const MoveCall& call, Stream stream) {
  calls_.count("move_experts");
  wrapped_->move_experts(call, stream);
}

void TestDriver::shift_rows(const ShiftCall& call, Stream stream) {
  calls_.count("shift_rows");
  wrapped_->shift_rows(call, stream);
}

void TestDriver::decode(const DecodeCall& call, Stream stream) {
  calls_.count("decode");
  wrapped_->decode(call, stream);
}

void TestDriver::register_host(const void* start, size_t bytes) {
  calls_.count("register_host", Failure::registration);
  wrapped_->register_host(start, bytes);
}

void TestDriver::unregister_host(const void* start) {
  const CallCount::Late late(calls_, "unregister_host");
  wrapped_->unregister_host(start);
  late.report();
}

Address TestDriver::host_address(const void* start, size_t bytes) {
  calls_.count("host_address");
  return wrapped_->host_address(start, bytes);
}

void* TestDriver::allocate_host(size_t bytes) {
  calls_.count("allocate_host", Failure::registration);
  return wrapped_->allocate_host(bytes);
}

void TestDriver::free_host(void* start) {
  const CallCount::Late late(calls_, "free_host");
  wrapped_->free_host(start);
  late.report();
}

}  // namespace penstock
