// Allocates, releases and copies weights ahead, and adds the waits between them (S1, S2).
#include "session/lru_session.h"

#include <algorithm>
#include <chrono>
#include <set>

#include "driver/cleanup.h"

namespace penstock {
namespace {

// Adds the host time of a call of the pool to the run's counters.
class PoolTimer {
 public:
  explicit PoolTimer(Counters& counters) : counters_(counters), begin_(std::chrono::steady_clock::now()) {}
  ~PoolTimer() {
    counters_.pool_calls++;
    counters_.pool_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  Counters& counters_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace

void LruSession::install(LruRecord record) {
  uninstall();
  record_ = std::move(record);
  Undo undo([&] { uninstall(); });
  // If no weight has bytes, no pool is needed, and a driver may take a cap of 0 for no cap.
  bool needed = std::any_of(record_.weights.begin(), record_.weights.end(),
                            [](const LruWeightRecord& weight) { return weight.bytes > 0; });
  if (needed && record_.budget_bytes) pool_ = driver_.create_pool((size_t)record_.budget_bytes);
  held_.resize(record_.weights.size());
  for (Held& held : held_) {
    held.ready = driver_.create_event(false);
    held.read = driver_.create_event(false);
  }
  std::vector<Shape> shapes;
  for (const LruMethodRecord& method : record_.methods) {
    Shape shape{{}, method.step_count};
    std::vector<std::vector<int64_t>> ending(method.step_count);
    for (size_t p = 0; p < method.accesses.size(); ++p) {
      shape.numbers.push_back(method.accesses[p].number);
      ending[method.accesses[p].last_step].push_back((int64_t)p);
    }
    shapes.push_back(std::move(shape));
    ending_.push_back(std::move(ending));
  }
  warm();
  for (size_t w = 0; w < held_.size(); ++w)
    if (record_.weights[w].pinned && record_.weights[w].bytes > 0 && !place((int64_t)w))
      throw CoreError(Failure::device_memory, "the pool has no room for what must stay on the device");
  driver_.synchronize_stream(copy_stream_);
  run_ = {};
  set_shapes(std::move(shapes));
  undo.keep();
}

void LruSession::warm() {
  if (!pool_) return;
  // The pool keeps memory that it once had. Taking all of it now makes a device that is short of memory fail at load,
  // and not slow down a run later.
  Address whole = driver_.pool_allocate(pool_, (size_t)record_.budget_bytes, copy_stream_);
  Undo give_back([&] { driver_.pool_release(pool_, whole, copy_stream_); });
  if (poison_) driver_.fill(whole, kPoison, (size_t)record_.budget_bytes, copy_stream_);
  give_back.keep();
  driver_.pool_release(pool_, whole, copy_stream_);
  std::set<int64_t> sizes;
  for (size_t w = 0; w < record_.weights.size(); ++w) sizes.insert(footprint_bytes((int64_t)w));
  std::vector<Address> warmed;
  std::vector<std::pair<PieceRecord, Address>> copies;
  Undo undo([&] {
    for (Address address : warmed) quietly([&] { driver_.pool_release(pool_, address, copy_stream_); });
  });
  int64_t sum = 0, largest = 0;
  for (int64_t bytes : sizes) {
    if (bytes == 0 || sum + bytes > record_.budget_bytes) continue;
    largest = bytes;
    warmed.push_back(driver_.pool_allocate(pool_, (size_t)bytes, copy_stream_));
    sum += bytes;
  }
  for (const LruWeightRecord& weight : record_.weights)
    if (largest && footprint_bytes(&weight - record_.weights.data()) == largest)
      copies = {{{weight.weight, 0, weight.bytes, 0, 0}, warmed.back()}};
  measure_link(copies);
  while (!warmed.empty()) {
    driver_.pool_release(pool_, warmed.back(), copy_stream_);
    warmed.pop_back();
  }
  undo.keep();
}

void LruSession::uninstall() noexcept {
  finish();
  set_shapes({});
  for (size_t w = 0; w < held_.size(); ++w) {
    if (held_[w].address) quietly([&] { driver_.pool_release(pool_, held_[w].address, copy_stream_); });
    if (held_[w].ready) quietly([&] { driver_.destroy_event(held_[w].ready); });
    if (held_[w].read) quietly([&] { driver_.destroy_event(held_[w].read); });
  }
  if (pool_) {
    // S4: another pool may follow, and this one gives back its memory only now.
    sync_with_retry([&] { driver_.synchronize_stream(copy_stream_); });
    quietly([&] { driver_.destroy_pool(pool_); });
  }
  pool_ = nullptr;
  held_.clear();
  ending_.clear();
  record_ = {};
  held_bytes_ = 0;
}

int64_t LruSession::peak_device_bytes() {
  if (pool_) peak_bytes_ = std::max(peak_bytes_, (int64_t)driver_.pool_peak_bytes(pool_));
  return peak_bytes_;
}

int64_t LruSession::footprint_bytes(int64_t weight) const {
  int64_t unit = record_.granularity_bytes;
  return (record_.weights[weight].bytes + unit - 1) / unit * unit;
}

void LruSession::release(Held& held, int64_t weight) {
  // S1: whatever takes these bytes next is behind this wait, and so behind the last reader.
  if (held.has_been_read) driver_.wait(copy_stream_, held.read);
  Address address = held.address;
  // Forget the address whatever the driver says: a call that reports a failure may have taken effect all the same, and
  // then the next run must not take what is left there for the weight.
  held.address = 0;
  held.unread = false;
  held.has_been_read = false;
  held_bytes_ -= footprint_bytes(weight);
  Undo give_back([&] { driver_.pool_release(pool_, address, copy_stream_); });
  if (poison_) driver_.fill(address, kPoison, (size_t)record_.weights[weight].bytes, copy_stream_);
  give_back.keep();
  PoolTimer timer(run_);
  driver_.pool_release(pool_, address, copy_stream_);
}

bool LruSession::evict_one() {
  int64_t victim = -1;
  for (size_t w = 0; w < held_.size(); ++w) {
    const Held& held = held_[w];
    if (!held.address || held.readers || record_.weights[w].pinned) continue;
    if (victim < 0 || held.last_use < held_[victim].last_use) victim = (int64_t)w;
  }
  if (victim < 0) return false;
  release(held_[victim], victim);
  return true;
}

bool LruSession::make_room(int64_t weight) {
  shortage_.clear();
  while (held_bytes_ + footprint_bytes(weight) > record_.budget_bytes)
    if (!evict_one()) return false;
  return true;
}

Address LruSession::allocate(int64_t weight) {
  auto bytes = (size_t)record_.weights[weight].bytes;
  for (bool waited = false;; waited = true) {
    try {
      PoolTimer timer(run_);
      return driver_.pool_allocate(pool_, bytes, copy_stream_);
    } catch (const DriverError& error) {
      if (error.failure != Failure::device_memory) throw;
      shortage_ = error.what();
      // Retry once without evicting more: there was enough room, only not in one piece.
      if (waited && !evict_one()) return 0;
      driver_.synchronize_stream(copy_stream_);
    }
  }
}

bool LruSession::place(int64_t weight) {
  if (!make_room(weight)) return false;
  Held& held = held_[weight];
  const LruWeightRecord& record = record_.weights[weight];
  held.address = allocate(weight);
  if (!held.address) return false;
  held_bytes_ += footprint_bytes(weight);
  if (trace_) trace_->copy_begins(run_number_, method_, weight, record.bytes, copy_stream_);
  source_.copy({record.weight, 0, record.bytes, 0, 0}, held.address, copy_stream_);
  if (trace_) trace_->copy_ends(copy_stream_);
  driver_.record(held.ready, copy_stream_);
  held.unread = true;
  held.last_use = ++clock_;
  run_.bytes_streamed += record.bytes;
  run_.copies++;
  return true;
}

void LruSession::begin_run(bool) {}

Address LruSession::acquire(int64_t position) {
  const LruAccessRecord& access = record_.methods[method_].accesses[position];
  const LruWeightRecord& record = record_.weights[access.weight];
  Held& held = held_[access.weight];
  if (record.bytes == 0) return 0;
  if (!held.address && !place(access.weight))
    throw CoreError(Failure::device_memory, "access " + std::to_string(access.number) + " needs " +
                                                std::to_string(footprint_bytes(access.weight)) +
                                                " bytes of a pool of " + std::to_string(record_.budget_bytes) +
                                                ", of which " + std::to_string(held_bytes_) +
                                                " are held by what must stay" + (shortage_.empty() ? "" : ": ") +
                                                shortage_);
  if (held.unread) {
    wait_for_copy(held.ready);
    held.unread = false;
    if (record.pinned) run_.bytes_hit += record.bytes;
  } else {
    run_.bytes_hit += record.bytes;
  }
  held.readers++;
  held.last_use = ++clock_;
  prefetch_after(position);
  return held.address;
}

void LruSession::prefetch_after(int64_t position) {
  const std::vector<LruAccessRecord>& accesses = record_.methods[method_].accesses;
  // Runs follow one another: after the last access comes the first.
  int64_t next = accesses[(position + 1) % accesses.size()].weight;
  // If there is no room, the next access makes its own copy: what must stay now need not stay then.
  if (record_.weights[next].bytes > 0 && !held_[next].address) place(next);
}

void LruSession::step_ended(int64_t step) {
  for (int64_t position : ending_[method_][step]) {
    const LruAccessRecord& access = record_.methods[method_].accesses[position];
    if (record_.weights[access.weight].bytes == 0) continue;
    Held& held = held_[access.weight];
    held.readers--;
    driver_.record(held.read, compute_);
    held.has_been_read = true;
  }
}

void LruSession::end_run() {}

void LruSession::capture_begins() {
  throw CoreError(Failure::capture, "which weight goes where is decided while running, and a graph would not decide again");
}

void LruSession::reset() noexcept {
  for (size_t w = 0; w < held_.size(); ++w) {
    held_[w].readers = 0;
    if (held_[w].address && !record_.weights[w].pinned) quietly([&] { release(held_[w], (int64_t)w); });
  }
}

}  // namespace penstock
