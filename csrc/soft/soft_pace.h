// When the streams of a soft driver run, and by which clock. Tests use this to force an order instead of hoping for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace penstock {

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

// The machine's clock until it is set. From then on it advances only by one tick per copy and kernel that has run.
class SoftClock {
 public:
  void set(int64_t now_ns, int64_t tick_ns);
  int64_t now_ns() const;
  void tick();

 private:
  std::atomic<bool> set_{false};
  std::atomic<int64_t> now_ns_{0};
  std::atomic<int64_t> tick_ns_{0};
};

// Counts the streams that have work they can do. A late stream is not counted: before each piece of work it waits until
// all of them are at rest. Counting must not order one stream behind another, or ThreadSanitizer would see no race.
class SoftRest {
 public:
  void add(int streams) { busy_.fetch_add(streams, std::memory_order_release); }
  void wait() const;

 private:
  std::atomic<int> busy_{0};
};

struct SoftPace {
  SoftDelays delays;
  SoftClock clock;
  SoftRest rest;
};

}  // namespace penstock
