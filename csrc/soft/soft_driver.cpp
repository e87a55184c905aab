// Implements the driver table with its parts: memory, pools, streams, host memory.
#include "soft/soft_driver.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "experts/expert_calls.h"
#include "host/fault_guard.h"
#include "packed/decode_call.h"

namespace penstock {
namespace {

[[noreturn]] void fail(const char* call, int code, const std::string& text) {
  throw DriverError(Failure::driver, std::string("soft ") + call, code, text);
}

void throw_if(const SoftFault& fault) {
  if (fault) throw DriverError(*fault);
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

SoftDriver::SoftDriver(size_t granularity_bytes, size_t capacity_bytes, bool poison)
    : capacity_(capacity_bytes), memory_(granularity_bytes, poison, capacity_), poison_(poison) {}

// Streams go first, because queued work uses the rest.
SoftDriver::~SoftDriver() { finish_streams(); }

void SoftDriver::finish_streams() { streams_.clear(); }

template <typename Thing>
std::shared_ptr<Thing> SoftDriver::find(const std::map<void*, std::shared_ptr<Thing>>& things, void* handle,
                                        const char* call, const char* kind) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = things.find(handle);
  if (found == things.end()) fail(call, EINVAL, std::string("there is no such ") + kind);
  return found->second;
}

template <typename Thing>
std::shared_ptr<Thing> SoftDriver::take(std::map<void*, std::shared_ptr<Thing>>& things, void* handle,
                                        const char* call, const char* kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = things.find(handle);
  if (found == things.end()) fail(call, EINVAL, std::string("there is no such ") + kind);
  auto thing = std::move(found->second);
  things.erase(found);
  return thing;
}

std::shared_ptr<SoftStream> SoftDriver::stream_of(Stream stream, const char* call) const {
  return find(streams_, stream, call, "stream");
}

std::shared_ptr<SoftEvent> SoftDriver::event_of(Event event, const char* call) const {
  return find(events_, event, call, "event");
}

std::shared_ptr<SoftStream> SoftDriver::queue_of(Stream stream, const char* call) const {
  return stream ? stream_of(stream, call) : nullptr;
}

void SoftDriver::enqueue(Stream stream, const char* call, Work kind, std::function<void()> body) {
  auto queue = queue_of(stream, call);
  auto timed = [this, body = std::move(body)] {
    body();
    pace_.clock.tick();
  };
  if (captured(stream, call, kind, timed)) return;
  if (queue)
    queue->work(std::move(timed));
  else
    timed();
}

MemoryInfo SoftDriver::memory_info() {
  return capacity_.info();
}

size_t SoftDriver::granularity_bytes() {
  return memory_.granularity_bytes;
}

Block SoftDriver::create_block(size_t bytes) {
  return memory_.create_block(bytes);
}

void SoftDriver::release_block(Block block) {
  memory_.release_block(block);
}

Address SoftDriver::reserve(size_t bytes) {
  return memory_.reserve(bytes);
}

void SoftDriver::unreserve(Address address, size_t bytes) {
  memory_.unreserve(address, bytes);
}

void SoftDriver::map(Address address, size_t bytes, Block block) {
  memory_.map(address, bytes, block);
}

void SoftDriver::allow_access(Address address, size_t bytes) {
  memory_.allow_access(address, bytes);
}

void SoftDriver::unmap(Address address, size_t bytes) {
  memory_.unmap(address, bytes);
}

Pool SoftDriver::create_pool(size_t max_bytes) {
  if (max_bytes == 0) fail("create_pool", EINVAL, "a pool of at most 0 bytes");
  auto entry = std::make_shared<PoolEntry>(max_bytes, poison_, capacity_);
  std::lock_guard<std::mutex> lock(mutex_);
  pools_[entry.get()] = entry;
  return entry.get();
}

void SoftDriver::destroy_pool(Pool pool) {
  auto entry = find(pools_, pool, "destroy_pool", "pool");
  if (size_t live = entry->pool.live())
    fail("destroy_pool", EBUSY,
         std::to_string(live) + " allocations of " + std::to_string(entry->pool.live_bytes()) + " bytes are still out");
  // Releases that are still queued hold the pool until they have been done.
  take(pools_, pool, "destroy_pool", "pool");
}

Address SoftDriver::pool_allocate(Pool pool, size_t bytes, Stream stream) {
  auto entry = find(pools_, pool, "pool_allocate", "pool");
  auto queue = queue_of(stream, "pool_allocate");
  std::lock_guard<std::mutex> lock(entry->mutex);
  const SoftPool::Lease lease = entry->pool.allocate(bytes, stream);
  if (poison_ && lease.fresh) {
    auto body = [entry, lease] { std::memset(pointer(lease.address), kPoison, lease.room_bytes); };
    if (queue)
      queue->work(body);
    else
      body();
  }
  return lease.address;
}

void SoftDriver::pool_release(Pool pool, Address address, Stream stream) {
  auto entry = find(pools_, pool, "pool_release", "pool");
  auto queue = queue_of(stream, "pool_release");
  std::lock_guard<std::mutex> lock(entry->mutex);
  auto release = entry->pool.release(address, stream);
  auto body = [entry, release] { entry->pool.execute(*release); };
  if (queue)
    queue->work_always(body);
  else
    body();
}

size_t SoftDriver::pool_peak_bytes(Pool pool) {
  return find(pools_, pool, "pool_peak_bytes", "pool")->pool.peak_bytes();
}

Stream SoftDriver::create_stream() {
  std::shared_ptr<SoftStream> stream;
  try {
    stream = std::make_shared<SoftStream>(pace_);
  } catch (const std::system_error& error) {
    fail("create_stream", error.code().value(), std::string("no thread is to be had: ") + error.what());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  streams_[stream.get()] = stream;
  return stream.get();
}

void SoftDriver::destroy_stream(Stream stream) {
  auto queue = take(streams_, stream, "destroy_stream", "stream");
  queue->finish();
}

void SoftDriver::synchronize_stream(Stream stream) {
  auto queue = queue_of(stream, "synchronize_stream");
  if (queue) throw_if(queue->drain());
}

Event SoftDriver::create_event(bool timing) {
  auto event = std::make_shared<SoftEvent>(timing);
  std::lock_guard<std::mutex> lock(mutex_);
  events_[event.get()] = event;
  return event.get();
}

void SoftDriver::destroy_event(Event event) {
  // Waiters hold the recording, not the event.
  take(events_, event, "destroy_event", "event");
}

void SoftDriver::record(Event event, Stream stream) {
  auto recorded = event_of(event, "record");
  auto queue = queue_of(stream, "record");
  auto completion = std::make_shared<Completion>(pace_);
  if (queue)
    queue->record(completion);
  else
    completion->complete(nullptr);
  recorded->record(std::move(completion));
}

void SoftDriver::wait(Stream stream, Event event) {
  auto queue = queue_of(stream, "wait");
  auto completion = event_of(event, "wait")->latest();
  if (!completion) return;
  if (queue) return queue->wait(std::move(completion));
  pace_.delays.pause_sometimes();
  throw_if(completion->await());
}

void SoftDriver::synchronize_event(Event event) {
  auto completion = event_of(event, "synchronize_event")->latest();
  if (completion) throw_if(completion->await());
}

bool SoftDriver::is_complete(Event event) {
  auto completion = event_of(event, "is_complete")->latest();
  if (!completion) return true;
  SoftFault fault;
  int64_t time_ns;
  const bool complete = completion->is_complete(&fault, &time_ns);
  throw_if(fault);
  return complete;
}

int64_t SoftDriver::elapsed_ns(Event from, Event to) {
  int64_t times_ns[2];
  const Event events[2] = {from, to};
  for (int i = 0; i < 2; ++i) {
    auto event = event_of(events[i], "elapsed_ns");
    const std::string which = i ? "the second event" : "the first event";
    if (!event->timing) fail("elapsed_ns", EINVAL, which + " was created without timing");
    auto completion = event->latest();
    if (!completion) fail("elapsed_ns", EINVAL, which + " was never recorded");
    SoftFault fault;
    const bool complete = completion->is_complete(&fault, &times_ns[i]);
    throw_if(fault);
    if (!complete) fail("elapsed_ns", EBUSY, which + " is not complete");
  }
  // With the precision of cuEventElapsedTime.
  const auto milliseconds = (float)((double)(times_ns[1] - times_ns[0]) / 1e6);
  return std::llround((double)milliseconds * 1e6);
}

void SoftDriver::copy_to_device(Address to, const void* from, size_t bytes, Stream stream) {
  enqueue(stream, "copy_to_device", Work::copy, [to, from, bytes] {
    if (!guarded_copy(pointer(to), from, bytes))
      throw DriverError(Failure::host_read, "soft copy_to_device", EFAULT,
                        "the source of " + std::to_string(bytes) + " bytes could not be read");
  });
}

void SoftDriver::copy_to_host(void* to, Address from, size_t bytes, Stream stream) {
  enqueue(stream, "copy_to_host", Work::copy,
          [to, from, bytes] { std::memcpy(to, pointer(from), bytes); });
}

void SoftDriver::fill(Address to, unsigned char value, size_t bytes, Stream stream) {
  enqueue(stream, "fill", Work::copy, [to, value, bytes] { std::memset(pointer(to), value, bytes); });
}

void SoftDriver::decode(const DecodeCall& call, Stream stream) {
  enqueue(stream, "decode", Work::kernel, [call] {
    for (size_t block = 0; block + 1 < call.begins_bytes.size(); ++block) {
      const int64_t at = (int64_t)block * kBlockRawBytes, bytes = std::min(kBlockRawBytes, call.weight_bytes - at);
      const int64_t begin = std::max(call.begin_bytes, at), end = std::min(call.end_bytes, at + bytes);
      if (begin >= end) continue;
      unpack_block(call.kind, static_cast<unsigned char*>(pointer(call.packed)) + call.begins_bytes[block],
                   call.begins_bytes[block + 1] - call.begins_bytes[block], bytes, begin - at, end - at,
                   static_cast<unsigned char*>(pointer(call.out)) + (begin - call.begin_bytes));
    }
  });
}

void SoftDriver::choose_experts(const ChooseCall& call, Stream stream) {
  enqueue(stream, "choose_experts", Work::kernel, [call] { penstock::choose_experts(call); });
}

void SoftDriver::move_experts(const MoveCall& call, Stream stream) {
  enqueue(stream, "move_experts", Work::kernel, [call] { penstock::move_experts(call); });
}

void SoftDriver::register_host(const void* start, size_t bytes) {
  host_.register_host(start, bytes);
}

void SoftDriver::unregister_host(const void* start) {
  host_.unregister_host(start);
}

Address SoftDriver::host_address(const void* start, size_t bytes) {
  host_.require_registered(start, bytes);
  return reinterpret_cast<Address>(start);
}

void* SoftDriver::allocate_host(size_t bytes) {
  void* start = host_.allocate(bytes);
  if (poison_) std::memset(start, kPoison, bytes);
  return start;
}

void SoftDriver::free_host(void* start) {
  host_.free(start);
}

void SoftDriver::launch(Stream stream, std::function<void()> body) {
  enqueue(stream, "launch", Work::kernel, std::move(body));
}

void SoftDriver::set_late(Stream stream, bool late) { stream_of(stream, "set_late")->set_late(late); }

SoftCounts SoftDriver::counts() const {
  SoftCounts counts{};
  const SoftMemoryCounts memory = memory_.counts();
  counts.blocks = (int64_t)memory.blocks;
  counts.block_bytes = (int64_t)memory.block_bytes;
  counts.peak_block_bytes = (int64_t)memory.peak_block_bytes;
  counts.ranges = (int64_t)memory.ranges;
  counts.mappings = (int64_t)memory.mappings;
  const SoftHostCounts host = host_.counts();
  counts.registrations = (int64_t)host.registrations;
  counts.registered_bytes = (int64_t)host.registered_bytes;
  counts.host_allocations = (int64_t)host.allocations;
  counts.host_bytes = (int64_t)host.bytes;
  counts.peak_host_bytes = (int64_t)host.peak_bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  counts.streams = (int64_t)streams_.size();
  counts.events = (int64_t)events_.size();
  counts.pools = (int64_t)pools_.size();
  for (const auto& [handle, entry] : pools_) {
    counts.pool_allocations += (int64_t)entry->pool.live();
    counts.pool_bytes += (int64_t)entry->pool.live_bytes();
  }
  return counts;
}

}  // namespace penstock
