// What a C++ program may call in the delegate library beside ExecuTorch's own interface. Each function returns an error
// number of ExecuTorch's; 0 is none. penstock_executorch_text() then gives the reason in words.
#pragma once

#include <cstdint>

extern "C" {

// State is the program's mutated buffers, under their names in the model. They lie on the delegates' device, one of
// each for all methods. `group` is what weight_offload_group said at load, "" without. `bytes` are those of the whole
// state, in memory order. After a failed run, reset the state before anything else: what the refusal calls
// reset_state() is penstock_executorch_reset_state().
int32_t penstock_executorch_read_state(const char* group, const char* name, void* to, int64_t bytes);
int32_t penstock_executorch_write_state(const char* group, const char* name, const void* from, int64_t bytes);
// Restores the initial values.
int32_t penstock_executorch_reset_state(const char* group);

// Copies timed when the plan was installed: so many, one after the other, and their total bytes over the link. First as
// the plan makes them, then some of each size; none if nothing is ever copied.
struct PenstockLinkSample {
  int64_t copies;
  int64_t bytes;
  int64_t ns;
};
// `delegate` is "" except for one with a budget of its own. `visit` is called for each sample, with `context`.
int32_t penstock_executorch_link(const char* group, const char* delegate,
                                 void (*visit)(const PenstockLinkSample*, void*), void* context);

// One copy or one step of a run, on the device's clock, from the start of the trace. Lane 0: a step that reads weights,
// once they are there. Lane 1: a copy; `index` is its number in the plan. Lane 2: link time of packed weights.
struct PenstockSpan {
  int64_t lane;
  int64_t run;
  // The delegate's number in the program.
  int64_t method;
  int64_t index;
  int64_t bytes;
  int64_t begin_ns;
  int64_t end_ns;
};
// Records runs until the trace is stopped. Meanwhile none is a CUDA graph, and the budget cannot change. Both functions
// are refused during a run.
int32_t penstock_executorch_start_trace(const char* group, const char* delegate);
// Waits for the device, and shows what was recorded, in the order in which it began.
int32_t penstock_executorch_stop_trace(const char* group, const char* delegate,
                                       void (*visit)(const PenstockSpan*, void*), void* context);

// The reason for the last refusal of a call on this thread.
const char* penstock_executorch_text();

}  // extern "C"
