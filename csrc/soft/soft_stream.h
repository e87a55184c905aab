// Streams of the soft driver: threads with a queue. Events: the completion of a queue up to a point.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver/driver.h"
#include "soft/soft_pace.h"

namespace penstock {

// Why a stream failed; null while it has not. It spreads to everything that is ordered after it.
using SoftFault = std::shared_ptr<const DriverError>;
// Null when the work ended well.
SoftFault fault_of(const std::function<void()>& work);

class SoftStream;

// One recording of an event.
class Completion {
 public:
  explicit Completion(SoftPace& pace) : pace_(pace) {}
  // Sets the piece of work that completes this. If none is set, this completes without a demand.
  void come_from(std::weak_ptr<SoftStream> stream, uint64_t number);
  void complete(SoftFault fault);
  // Blocks until complete, and makes a late stream get there. `counted`: the caller is a stream, and rests meanwhile.
  SoftFault await(bool counted = false);
  void demand();
  bool is_complete(SoftFault* fault, int64_t* time_ns);

 private:
  SoftPace& pace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::weak_ptr<SoftStream> stream_;
  uint64_t number_ = 0;
  int resting_ = 0;  // streams that wait here, and have work again once this is complete
  bool complete_ = false;
  int64_t time_ns_ = 0;
  SoftFault fault_;
};

// Recording again replaces the completion, so that waiters for an earlier one are not disturbed.
class SoftEvent {
 public:
  explicit SoftEvent(bool timing) : timing(timing) {}
  std::shared_ptr<Completion> latest() const;
  void record(std::shared_ptr<Completion> completion);
  const bool timing;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Completion> latest_;  // null until recorded
};

class SoftStream : public std::enable_shared_from_this<SoftStream> {
 public:
  explicit SoftStream(SoftPace& pace);
  ~SoftStream() { finish(); }
  SoftStream(const SoftStream&) = delete;
  SoftStream& operator=(const SoftStream&) = delete;

  // Skipped once the stream has failed; a DriverError thrown by the work fails the stream.
  void work(std::function<void()> body);
  // Runs even on a failed stream: for work that gives memory back.
  void work_always(std::function<void()> body);
  void record(std::shared_ptr<Completion> completion);
  void wait(std::shared_ptr<Completion> completion);
  // For work that handles faults itself: it gets the stream's fault, and what it returns becomes the stream's fault.
  void work_through(std::function<SoftFault(SoftFault)> body, const std::vector<std::shared_ptr<Completion>>& completes);
  // Blocks until everything queued before has been done.
  SoftFault drain();
  // Ends the thread once its queue is empty. Later work is refused.
  void finish();

  // As late as possible: work runs only when somebody waits for it, and only up to that point. Before each piece, every
  // stream that is not late must be at rest. Drains the stream first.
  void set_late(bool late);
  // Somebody waits for the work of this number.
  void demand(uint64_t number);
  // Called by the stream's own work while it can do nothing but wait for others.
  template <typename Wait>
  void while_resting(Wait wait) {
    if (counted_) pace_.rest.add(-1);
    wait();
    if (counted_) pace_.rest.add(1);
  }

 private:
  struct Task {
    std::function<void()> body;
    bool always;
    uint64_t number = 0;
  };
  // `completes`: what completes when the task has been done.
  void push(Task task, const std::vector<std::shared_ptr<Completion>>& completes = {});
  bool may_work() const;
  void loop();

  SoftPace& pace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  uint64_t pushed_ = 0;
  uint64_t demanded_ = 0;
  bool late_ = false;
  bool busy_ = false;  // has work, and is counted as such
  bool finishing_ = false;
  std::atomic<bool> counted_{true};  // !late_, for the stream's own thread
  SoftFault fault_;  // of the stream's own thread
  std::mutex join_mutex_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace penstock
