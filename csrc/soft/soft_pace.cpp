// Pauses, ticks and rest.
#include "soft/soft_pace.h"

#include <chrono>
#include <thread>

namespace penstock {

// splitmix64
uint64_t split_mix(uint64_t& state) {
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void SoftDelays::set(uint64_t seed, uint64_t max_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  state_ = seed;
  max_ns_ = max_ns;
  on_ = seed != 0 && max_ns != 0;
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

void SoftClock::set(int64_t now_ns, int64_t tick_ns) {
  now_ns_ = now_ns;
  tick_ns_ = tick_ns;
  set_ = true;
}

int64_t SoftClock::now_ns() const {
  if (set_) return now_ns_;
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void SoftClock::tick() { now_ns_ += tick_ns_; }

void SoftRest::wait() const {
  while (busy_.load(std::memory_order_acquire) > 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace penstock
