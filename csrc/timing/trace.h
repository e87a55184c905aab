// When copies and steps began and ended, by the device's own clock.
#pragma once

#include <vector>

#include "driver/driver.h"

namespace penstock {

// `link`: what packed weights take of it, before they are decoded, which is what their copies show.
enum class Lane : int64_t { compute = 0, copy = 1, link = 2 };

// One span, as handed out: `index` is the step or the copy, of method `method` in run `run`.
struct SpanRecord {
  int64_t lane;
  int64_t run;
  int64_t method;
  int64_t index;
  int64_t bytes;
  int64_t begin_ns;
  int64_t end_ns;
};

class Trace {
 public:
  // Times count from here. `stream` is any stream of the driver. Drivers tell times between two events as milliseconds
  // in float, which after an hour are steps of 250 us: so each event is measured from one close to it.
  Trace(Driver& driver, Stream stream);
  ~Trace();

  void copy_begins(int64_t run, int64_t method, int64_t copy, int64_t bytes, Stream stream);
  void copy_ends(Stream stream);
  // Bytes of the copy that is open, on their way to where they are decoded from.
  void link_begins(int64_t bytes, Stream stream);
  void link_ends(Stream stream);
  // A step may begin several times: what counts is the last, after everything it reads has been waited for.
  void step_begins(int64_t run, int64_t method, int64_t step, Stream stream);
  void step_ends(int64_t run, int64_t method, int64_t step, Stream stream);
  // A run failed: a span without an end is dropped.
  void drop_open();

  // Waits for every span, and hands them out in the order in which they began.
  std::vector<SpanRecord> collect();

 private:
  struct Span {
    Lane lane;
    int64_t run, method, index, bytes;
    Event begin = nullptr;
    Event end = nullptr;
    bool ended = false;
    // A step that fetches nothing new begins where this span ended. -1: it has a beginning of its own.
    int64_t after = -1;
    int64_t end_ns = 0;  // once collected
  };
  Span& open(Lane lane, int64_t run, int64_t method, int64_t index, int64_t bytes);

  Driver& driver_;
  Event base_ = nullptr;
  std::vector<Span> spans_;
  // Indices into spans_, -1: none.
  int64_t open_copy_ = -1;
  int64_t open_link_ = -1;
  int64_t open_step_ = -1;
  int64_t last_step_ = -1;
};

}  // namespace penstock
