// Records the events of spans, and turns the distances between them into times of one clock.
#include "timing/trace.h"

#include <algorithm>
#include <cstdlib>

#include "driver/cleanup.h"

namespace penstock {
namespace {
// Up to here, milliseconds in a float resolve single nanoseconds.
constexpr int64_t kNearNs = 8'000'000;
}  // namespace

Trace::Trace(Driver& driver, Stream stream) : driver_(driver), base_(driver.create_event(true)) {
  Undo undo([&] { driver_.destroy_event(base_); });
  driver_.record(base_, stream);
  undo.keep();
}

Trace::~Trace() {
  for (Span& span : spans_) {
    if (span.begin) quietly([&] { driver_.destroy_event(span.begin); });
    if (span.end) quietly([&] { driver_.destroy_event(span.end); });
  }
  quietly([&] { driver_.destroy_event(base_); });
}

Trace::Span& Trace::open(Lane lane, int64_t run, int64_t method, int64_t index, int64_t bytes) {
  spans_.push_back({lane, run, method, index, bytes});
  spans_.back().begin = driver_.create_event(true);
  spans_.back().end = driver_.create_event(true);
  return spans_.back();
}

void Trace::copy_begins(int64_t run, int64_t method, int64_t copy, int64_t bytes, Stream stream) {
  driver_.record(open(Lane::copy, run, method, copy, bytes).begin, stream);
  open_copy_ = (int64_t)spans_.size() - 1;
}

void Trace::copy_ends(Stream stream) {
  driver_.record(spans_[open_copy_].end, stream);
  spans_[open_copy_].ended = true;
  open_copy_ = -1;
}

void Trace::link_begins(int64_t bytes, Stream stream) {
  const Span copy = spans_[open_copy_];
  driver_.record(open(Lane::link, copy.run, copy.method, copy.index, bytes).begin, stream);
  open_link_ = (int64_t)spans_.size() - 1;
}

void Trace::link_ends(Stream stream) {
  driver_.record(spans_[open_link_].end, stream);
  spans_[open_link_].ended = true;
  open_link_ = -1;
}

void Trace::step_begins(int64_t run, int64_t method, int64_t step, Stream stream) {
  if (open_step_ < 0) {
    open(Lane::compute, run, method, step, 0);
    open_step_ = (int64_t)spans_.size() - 1;
  }
  driver_.record(spans_[open_step_].begin, stream);
}

void Trace::step_ends(int64_t run, int64_t method, int64_t step, Stream stream) {
  if (open_step_ < 0) {
    step_begins(run, method, step, stream);
    spans_[open_step_].after = last_step_;
  }
  driver_.record(spans_[open_step_].end, stream);
  spans_[open_step_].ended = true;
  last_step_ = open_step_;
  open_step_ = -1;
}

void Trace::drop_open() {
  open_copy_ = -1;
  open_link_ = -1;
  open_step_ = -1;
  last_step_ = -1;
}

std::vector<SpanRecord> Trace::collect() {
  std::vector<SpanRecord> records;
  driver_.synchronize_event(base_);
  // One per lane: copies for the next run may be made long after steps that come behind them in this list.
  Event near_of[] = {base_, base_, base_};
  int64_t near_ns_of[] = {0, 0, 0};
  for (Span& span : spans_) {
    if (!span.ended) continue;
    driver_.synchronize_event(span.end);
    Event& near = near_of[(size_t)span.lane];
    int64_t& near_ns = near_ns_of[(size_t)span.lane];
    int64_t begin_ns;
    if (span.after < 0) {
      int64_t distance_ns = driver_.elapsed_ns(near, span.begin);
      begin_ns = near_ns + distance_ns;
      span.end_ns = begin_ns + driver_.elapsed_ns(span.begin, span.end);
      if (std::abs(distance_ns) > kNearNs) {
        near = span.begin;
        near_ns = begin_ns;
      }
    } else {
      const Span& before = spans_[span.after];
      begin_ns = before.end_ns;
      span.end_ns = begin_ns + driver_.elapsed_ns(before.end, span.end);
    }
    records.push_back(
        {(int64_t)span.lane, span.run, span.method, span.index, span.bytes, begin_ns, span.end_ns});
  }
  std::stable_sort(records.begin(), records.end(),
                   [](const SpanRecord& a, const SpanRecord& b) { return a.begin_ns < b.begin_ns; });
  return records;
}

}  // namespace penstock
