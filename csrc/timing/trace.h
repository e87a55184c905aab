// Records when copies and steps began and ended, by the device's own clock.
#pragma once

#include <vector>

#include "driver/driver.h"

namespace penstock {

// `link`: packed weights on the link, before they are decoded. Their spans in the copy lane show the decoding.
enum class Lane : int64_t { compute = 0, copy = 1, link = 2 };

// One span, as returned: `index` is the step or the copy, of method `method` in run `run`.
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
  // Times count from here. `stream` is any stream of the driver. Drivers give the time between two events as
  // milliseconds in float, which after an hour has steps of 250 us. So each event is measured from one close to it.
  Trace(Driver& driver, Stream stream);
  ~Trace();

  void copy_begins(int64_t run, int64_t method, int64_t copy, int64_t bytes, Stream stream);
  void copy_ends(Stream stream);
  // Bytes of the open copy, on their way to where they are decoded from.
  void link_begins(int64_t bytes, Stream stream);
  void link_ends(Stream stream);
  // A step may begin several times. Only the last counts: everything the step reads has then been waited for.
  void step_begins(int64_t run, int64_t method, int64_t step, Stream stream);
  void step_ends(int64_t run, int64_t method, int64_t step, Stream stream);
  // A run failed: drops spans without an end.
  void drop_open();

  // Waits for every span, and returns them in the order in which they began.
  std::vector<SpanRecord> collect();

 private:
  struct Span {
    Lane lane;
    int64_t run, method, index, bytes;
    Event begin = nullptr;
    Event end = nullptr;
    bool ended = false;
    // A step that fetches nothing new begins where this span ended. -1: the span has its own begin event.
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
