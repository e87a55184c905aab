// Runs of a plan as CUDA graphs. When a graph begins, the ring holds what it holds at the start of a run that follows
// another run of its method. So replays and ordinary runs follow one another in any order (S9).
#include "session/planned_session.h"

namespace penstock {

void PlannedSession::create_capture_events(MethodState& method) {
  auto create = [&](Event& event) {
    if (!event) event = driver_.create_event(false);
  };
  for (Event* event : {&fork_, &lead_}) create(*event);
  for (StayState& stay : method.stays) create(stay.ready_in_graph);
  for (StepState& step : method.steps)
    if (step.ended) create(step.ended_in_graph);
}

void PlannedSession::capture_begins() {
  if (!source_.is_fixed())
    throw CoreError(Failure::capture, "staging buffers are filled by the host while it runs, and a graph runs without it");
  MethodState& method = methods_[method_];
  create_capture_events(method);
  before_capture_ = method.progress;
  capturing_ = true;
  next_copy_ = 0;
  begin_choices();
  for (StepState& step : method.steps) step.is_captured = false;
  forget_copies(method);
  for (int64_t copy : plan_.methods[method_].prologue) {
    advance(method, copy);
    method.progress[plan_.methods[method_].copies[copy].stay].before_graph = true;
  }
  if (!method.graph_copies) return;
  driver_.record(fork_, compute_);
  driver_.wait(copy_stream_, fork_);
  source_.begin_capture({method.cycle.begin(), method.cycle.begin() + (std::ptrdiff_t)method.graph_copies}, copy_stream_);
}

void PlannedSession::capture_ends() {
  MethodState& method = methods_[method_];
  issue_until((int64_t)plan_.methods[method_].accesses.size());
  // The branch of the copies needs no join of its own: a kernel of this run waits for the last copy.
  method.after_graph = method.progress;
  for (Progress& progress : method.after_graph) progress.before_graph = false;
  method.graph_counters = run_;
  restore_progress();
}

void PlannedSession::restore_progress() noexcept {
  // Nothing was done on the device, so the ring still holds what it held.
  if (capturing_) methods_[method_].progress.swap(before_capture_);
  source_.end_capture();
  capturing_ = false;
}

void PlannedSession::replay_begins(bool cold) {
  driver_.record(lead_, copy_stream_);
  if (!cold) return;
  // S1: copies that the last run made for the next run of its own method may still be writing to any page, and a
  // graph's copies are not behind them on their stream. In a warm run their data is read before it is overwritten.
  driver_.wait(compute_, lead_);
  const MethodState& method = methods_[method_];
  for (size_t s = 0; s < method.stays.size(); ++s)
    if (method.stays[s].crosses) run_.bytes_hit -= plan_.methods[method_].stays[s].bytes;
}

void PlannedSession::replay_ends() {
  MethodState& method = methods_[method_];
  method.progress = method.after_graph;
  run_.bytes_streamed += method.graph_counters.bytes_streamed;
  run_.bytes_hit += method.graph_counters.bytes_hit;
  run_.copies += method.graph_counters.copies;
  run_.bytes_in_place += method.graph_counters.bytes_in_place;
  run_.bytes_decoded += method.graph_counters.bytes_decoded;
  next_copy_ = method.graph_copies;
  end_run();
}

}  // namespace penstock
