// Measures how long the compute stream waited for copies, by events on both sides of each wait.
#pragma once

#include <array>
#include <vector>

#include "driver/driver.h"

namespace penstock {

class StallMeter {
 public:
  explicit StallMeter(Driver& driver) : driver_(driver) {}
  ~StallMeter();

  void begin_run();
  // Around a wait of the compute stream.
  void before(Stream stream);
  void after(Stream stream);
  // The run's events will not complete in order, so this forgets them.
  void discard_run();

  // Both wait for the runs they count.
  int64_t last_run_ns();
  int64_t total_ns();

 private:
  struct Wait {
    Event before;
    Event after;
  };
  struct Run {
    std::vector<Wait> waits;  // created once, then reused
    size_t used = 0;
    bool collected = true;
    int64_t stall_ns = 0;
  };

  void collect(Run& run);

  // A host that is more runs ahead of the device than this waits for it. This bounds the number of events.
  static constexpr size_t kRuns = 8;
  Driver& driver_;
  std::array<Run, kRuns> runs_;
  size_t current_ = 0;
  int64_t total_ns_ = 0;
};

}  // namespace penstock
