#include "soft_stream.h"

#include <cerrno>
#include <chrono>
#include <utility>

namespace penstock {

SoftFault fault_of(const std::function<void()>& work) {
  try {
    work();
    return nullptr;
  } catch (const DriverError& error) {
    return std::make_shared<DriverError>(error);
  } catch (const std::exception& error) {
    return std::make_shared<DriverError>(Failure::driver, "soft stream", EIO, error.what());
  }
}

void Completion::complete(SoftFault fault) {
  // Notified under the lock: the waiter may drop the last reference as soon as it can see the flag.
  std::lock_guard<std::mutex> lock(mutex_);
  complete_ = true;
  fault_ = std::move(fault);
  time_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
                 .count();
  changed_.notify_all();
}

SoftFault Completion::await() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return complete_; });
  return fault_;
}

bool Completion::is_complete(SoftFault* fault, int64_t* time_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  *fault = fault_;
  *time_ns = time_ns_;
  return complete_;
}

std::shared_ptr<Completion> SoftEvent::latest() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return latest_;
}

void SoftEvent::record(std::shared_ptr<Completion> completion) {
  std::lock_guard<std::mutex> lock(mutex_);
  latest_ = std::move(completion);
  mark_ = nullptr;
}

std::shared_ptr<const SoftMark> SoftEvent::mark() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return mark_;
}

void SoftEvent::record(std::shared_ptr<const SoftMark> mark) {
  std::lock_guard<std::mutex> lock(mutex_);
  mark_ = std::move(mark);
}

void SoftDelays::set(uint64_t seed, uint64_t max_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  state_ = seed;
  max_ns_ = max_ns;
  on_ = seed != 0 && max_ns != 0;
}

// splitmix64
uint64_t split_mix(uint64_t& state) {
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void SoftDelays::pause() {
  if (!on_) return;
  uint64_t pause_ns;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pause_ns = max_ns_ ? split_mix(state_) % max_ns_ : 0;
  }
  std::this_thread::sleep_for(std::chrono::nanoseconds(pause_ns));
}

void SoftDelays::pause_sometimes() {
  if (!on_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (split_mix(state_) & 1) return;
  }
  pause();
}

SoftStream::SoftStream(SoftDelays& delays) : delays_(delays), thread_([this] { loop(); }) {}

void SoftStream::work(std::function<void()> body) { push({std::move(body), false}); }

void SoftStream::work_always(std::function<void()> body) { push({std::move(body), true}); }

void SoftStream::record(std::shared_ptr<Completion> completion) {
  push({[this, completion = std::move(completion)] { completion->complete(fault_); }, true});
}

void SoftStream::wait(std::shared_ptr<Completion> completion) {
  // Also on a failed stream: memory that a later release gives back may still be in use where this waits for.
  auto body = [this, completion = std::move(completion)] {
    SoftFault fault = completion->await();
    if (fault && !fault_) fault_ = fault;
  };
  push({std::move(body), true});
}

void SoftStream::work_through(std::function<SoftFault(SoftFault)> body) {
  push({[this, body = std::move(body)] { fault_ = body(fault_); }, true});
}

SoftFault SoftStream::drain() {
  auto completion = std::make_shared<Completion>();
  record(completion);
  return completion->await();
}

void SoftStream::finish() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    finishing_ = true;
    changed_.notify_all();
  }
  std::lock_guard<std::mutex> lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void SoftStream::push(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (finishing_) throw DriverError(Failure::driver, "soft stream", EINVAL, "the stream is being destroyed");
  queue_.push_back(std::move(task));
  changed_.notify_one();
}

void SoftStream::loop() {
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return finishing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    delays_.pause();
    if (fault_ && !task.always) continue;
    if (SoftFault fault = fault_of(task.body)) fault_ = std::move(fault);
  }
}

}  // namespace penstock
