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

// Of the last call on this thread that was refused.
const char* penstock_executorch_text();

}  // extern "C"
