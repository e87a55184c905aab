// Keeps the events on both sides of a run's waits, reuses them in a later run, and sums the time between them.
#include "timing/stall_meter.h"

#include "driver/cleanup.h"

namespace penstock {

StallMeter::~StallMeter() {
  for (Run& run : runs_)
    for (Wait& wait : run.waits) {
      quietly([&] { driver_.destroy_event(wait.before); });
      quietly([&] { driver_.destroy_event(wait.after); });
    }
}

void StallMeter::begin_run() {
  current_ = (current_ + 1) % kRuns;
  Run& run = runs_[current_];
  collect(run);
  run.used = 0;
  run.stall_ns = 0;
  run.collected = false;
}

void StallMeter::before(Stream stream) {
  Run& run = runs_[current_];
  if (run.used == run.waits.size()) {
    Event before = driver_.create_event(true);
    Undo undo([&] { driver_.destroy_event(before); });
    run.waits.push_back({before, driver_.create_event(true)});
    undo.keep();
  }
  driver_.record(run.waits[run.used].before, stream);
}

void StallMeter::after(Stream stream) {
  Run& run = runs_[current_];
  driver_.record(run.waits[run.used].after, stream);
  run.used++;
}

void StallMeter::discard_run() {
  Run& run = runs_[current_];
  run.used = 0;
  run.collected = true;
}

int64_t StallMeter::last_run_ns() {
  collect(runs_[current_]);
  return runs_[current_].stall_ns;
}

int64_t StallMeter::total_ns() {
  for (Run& run : runs_) collect(run);
  return total_ns_;
}

void StallMeter::collect(Run& run) {
  if (run.collected) return;
  if (run.used) driver_.synchronize_event(run.waits[run.used - 1].after);
  // Whole or not at all: after a failure the run is counted again from its first wait.
  int64_t stall_ns = 0;
  for (size_t i = 0; i < run.used; ++i) stall_ns += driver_.elapsed_ns(run.waits[i].before, run.waits[i].after);
  run.stall_ns = stall_ns;
  total_ns_ += stall_ns;
  run.collected = true;
}

}  // namespace penstock
