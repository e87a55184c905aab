// Streams of the soft driver: threads with a queue. Events: the completion of a queue up to a point.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "driver.h"

namespace penstock {

// Why a stream failed; null while it has not. It spreads to everything that is ordered after it.
using SoftFault = std::shared_ptr<const DriverError>;
// Null when the work ended well.
SoftFault fault_of(const std::function<void()>& work);

// One recording of an event.
class Completion {
 public:
  void complete(SoftFault fault);
  // Blocks until complete.
  SoftFault await();
  bool is_complete(SoftFault* fault, int64_t* time_ns);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool complete_ = false;
  int64_t time_ns_ = 0;
  SoftFault fault_;
};

struct SoftCapture;

// One recording of an event in a captured stream: what has been captured there by then.
struct SoftMark {
  std::weak_ptr<SoftCapture> capture;  // gone when the capture has ended
  std::set<size_t> nodes;
};

// Recording again replaces the completion, so that those who wait for an earlier one are not disturbed.
class SoftEvent {
 public:
  explicit SoftEvent(bool timing) : timing(timing) {}
  std::shared_ptr<Completion> latest() const;
  // Null unless the event was recorded in a captured stream, and last there.
  std::shared_ptr<const SoftMark> mark() const;
  void record(std::shared_ptr<Completion> completion);
  void record(std::shared_ptr<const SoftMark> mark);
  const bool timing;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Completion> latest_;  // null until recorded
  std::shared_ptr<const SoftMark> mark_;
};

// The next pseudo-random number.
uint64_t split_mix(uint64_t& state);

// Pseudo-random pauses that shake the order in which threads run. Off while the seed is 0.
class SoftDelays {
 public:
  void set(uint64_t seed, uint64_t max_ns);
  void pause();
  // Pauses about every second time.
  void pause_sometimes();

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  uint64_t state_ = 0;
  uint64_t max_ns_ = 0;
};

class SoftStream {
 public:
  explicit SoftStream(SoftDelays& delays);
  ~SoftStream() { finish(); }
  SoftStream(const SoftStream&) = delete;
  SoftStream& operator=(const SoftStream&) = delete;

  // Skipped once the stream has failed; a DriverError out of the work fails the stream.
  void work(std::function<void()> body);
  // Done even on a failed stream: what gives memory back.
  void work_always(std::function<void()> body);
  void record(std::shared_ptr<Completion> completion);
  void wait(std::shared_ptr<Completion> completion);
  // What has its own way with a fault: takes the stream's, and leaves it with what it returns.
  void work_through(std::function<SoftFault(SoftFault)> body);
  // Blocks until everything queued before has been done.
  SoftFault drain();
  // Ends the thread once its queue is empty. Later work is refused.
  void finish();

 private:
  struct Task {
    std::function<void()> body;
    bool always;
  };
  void push(Task task);
  void loop();

  SoftDelays& delays_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool finishing_ = false;
  SoftFault fault_;  // of the stream's own thread
  std::mutex join_mutex_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace penstock
