// The thread of a stream, its queue, and how a failed stream passes its error on.
#include "soft/soft_stream.h"

#include <cerrno>
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

void Completion::come_from(std::weak_ptr<SoftStream> stream, uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  stream_ = std::move(stream);
  number_ = number;
}

void Completion::complete(SoftFault fault) {
  // Notified under the lock: the waiter may drop the last reference as soon as it can see the flag.
  std::lock_guard<std::mutex> lock(mutex_);
  complete_ = true;
  fault_ = std::move(fault);
  time_ns_ = pace_.clock.now_ns();
  if (resting_) pace_.rest.add(resting_);
  changed_.notify_all();
}

void Completion::demand() {
  std::unique_lock<std::mutex> lock(mutex_);
  std::shared_ptr<SoftStream> stream = complete_ ? nullptr : stream_.lock();
  const uint64_t number = number_;
  lock.unlock();
  if (stream) stream->demand(number);
}

SoftFault Completion::await(bool counted) {
  demand();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!complete_ && counted) {
    resting_++;
    pace_.rest.add(-1);
  }
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
}

SoftStream::SoftStream(SoftPace& pace) : pace_(pace), thread_([this] { loop(); }) {}

void SoftStream::work(std::function<void()> body) { push({std::move(body), false}); }

void SoftStream::work_always(std::function<void()> body) { push({std::move(body), true}); }

void SoftStream::record(std::shared_ptr<Completion> completion) {
  push({[this, completion] { completion->complete(fault_); }, true}, {completion});
}

void SoftStream::wait(std::shared_ptr<Completion> completion) {
  // Also on a failed stream: the work that this waits for may still use memory that a later release gives back.
  auto body = [this, completion = std::move(completion)] {
    SoftFault fault = completion->await(counted_);
    if (fault && !fault_) fault_ = fault;
  };
  push({std::move(body), true});
}

void SoftStream::work_through(std::function<SoftFault(SoftFault)> body,
                              const std::vector<std::shared_ptr<Completion>>& completes) {
  push({[this, body = std::move(body)] { fault_ = body(fault_); }, true}, completes);
}

SoftFault SoftStream::drain() {
  auto completion = std::make_shared<Completion>(pace_);
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

void SoftStream::set_late(bool late) {
  drain();
  std::unique_lock<std::mutex> lock(mutex_);
  // The thread has done all of its work, and is about to clear busy_.
  changed_.wait(lock, [this] { return !busy_; });
  late_ = late;
  counted_ = !late;
}

void SoftStream::demand(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number <= demanded_) return;
  demanded_ = number;
  if (late_) changed_.notify_all();
}

void SoftStream::push(Task task, const std::vector<std::shared_ptr<Completion>>& completes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (finishing_) throw DriverError(Failure::driver, "soft stream", EINVAL, "the stream is being destroyed");
  task.number = ++pushed_;
  for (const auto& completion : completes) completion->come_from(weak_from_this(), task.number);
  queue_.push_back(std::move(task));
  if (!late_ && !busy_) {
    busy_ = true;
    pace_.rest.add(1);
  }
  changed_.notify_all();
}

bool SoftStream::may_work() const {
  return !queue_.empty() && (!late_ || finishing_ || queue_.front().number <= demanded_);
}

void SoftStream::loop() {
  for (;;) {
    Task task;
    bool late;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (queue_.empty() && busy_) {
        busy_ = false;
        pace_.rest.add(-1);
        changed_.notify_all();
      }
      changed_.wait(lock, [this] { return may_work() || (finishing_ && queue_.empty()); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
      late = late_;
    }
    if (late) pace_.rest.wait();
    pace_.delays.pause();
    if (fault_ && !task.always) continue;
    if (SoftFault fault = fault_of(task.body)) fault_ = std::move(fault);
  }
}

}  // namespace penstock
