// What a C++ program may call of the delegate library beside ExecuTorch's own interface. Each function gives an error
// number of ExecuTorch's; 0 is none. penstock_executorch_text() then tells why, in words.
#pragma once

#include <cstdint>

extern "C" {

// State is the program's mutated buffers, by the names that they have in the model: they lie on the delegates' device,
// one of each for all methods. `group` is what weight_offload_group said at load, "" without. `bytes` are those of the
// whole state, in the order of its memory. After a run that failed, reset it before anything else.
int32_t penstock_executorch_read_state(const char* group, const char* name, void* to, int64_t bytes);
int32_t penstock_executorch_write_state(const char* group, const char* name, const void* from, int64_t bytes);
// Puts the first values back.
int32_t penstock_executorch_reset_state(const char* group);

// Copies as they were timed when the plan was installed: so many, one after the other, and the bytes that they take over
// the link together. First as the plan makes them, then some of each size; none where nothing is ever copied.
struct PenstockLinkSample {
  int64_t copies;
  int64_t bytes;
  int64_t ns;
};
// `delegate` is "" but for one with a budget of its own; `visit` is called for each, with `context`.
int32_t penstock_executorch_link(const char* group, const char* delegate,
                                 void (*visit)(const PenstockLinkSample*, void*), void* context);

// One copy or one step of a run, on the device's clock, from the start of the trace. Lane 0: a step that reads weights,
// once they are there. Lane 1: a copy; `index` counts those of the plan. Lane 2: what packed weights take of the link.
struct PenstockSpan {
  int64_t lane;
  int64_t run;
  // As the program counts its delegates.
  int64_t method;
  int64_t index;
  int64_t bytes;
  int64_t begin_ns;
  int64_t end_ns;
};
// Runs from here on are recorded until the trace is stopped, and meanwhile none is a CUDA graph; the budget stays. Both
// are refused during a run.
int32_t penstock_executorch_start_trace(const char* group, const char* delegate);
// Waits for the device, and shows what was recorded, in the order in which it began.
int32_t penstock_executorch_stop_trace(const char* group, const char* delegate,
                                       void (*visit)(const PenstockSpan*, void*), void* context);

// Of the last call on this thread that was refused.
const char* penstock_executorch_text();

}  // extern "C"
