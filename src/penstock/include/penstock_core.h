// What the core's C interface passes by structure: how a program is opened, which budget holds, and what is said of both.
// Python has the same fields in runtime/session.py and runtime/budget_choice.py.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct PenstockOpenRequest {
  // The weights file.
  const char* path;
  // Offset and bytes in it of each weight, in the order in which plans number them.
  const int64_t* extents;
  int64_t extent_count;
  // Of the pinned buffers that weights pass through; -1: the file is registered as it is mapped.
  int64_t host_cap_bytes;
  // What else will be held there: of the soft driver, whose device memory is host memory too, and state.
  int64_t extra_host_bytes;
  // The records of weights that are packed in the file; none: there are none.
  const int64_t* packed;
  int64_t packed_count;
  // Holds proc/ and sys/, where limits of memory are; "/" but in tests.
  const char* root;
  // What penstock_probe_begin gave, or null: then a probe is begun where one is needed.
  void* probe;
  // Told how many more bytes of the file are in memory; what is not 0 gives up. May be null.
  int32_t (*on_bytes)(int64_t bytes);
  // The policy: 0 is a plan.
  int32_t lru;
  int32_t device_index;
  int32_t poison;
};

// What a program was compiled for, or what is here. Compiled code calls torch and the machine directly.
struct PenstockBuild {
  const char* torch;
  // As uname has it.
  const char* machine;
  // What torch calls the instructions of the CPU.
  const char* cpu;
  // Of a GPU, as in "9.0"; null: none is compared.
  const char* capability;
  const char* gpu;
  // "cuda:1", for the message.
  const char* device;
};

// Where a budget comes from.
enum {
  PENSTOCK_BUDGET_LOAD = 0,
  PENSTOCK_BUDGET_TOTAL = 1,
  PENSTOCK_BUDGET_CHANGE = 2,
  PENSTOCK_BUDGET_BAKED = 3,
  PENSTOCK_BUDGET_AUTOMATIC = 4,
};

// In place of an amount.
enum { PENSTOCK_NONE = -1, PENSTOCK_AUTOMATIC = -2 };

struct PenstockBudget {
  int64_t floor_bytes;
  // With every weight resident.
  int64_t full_bytes;
  // A number, PENSTOCK_NONE or PENSTOCK_AUTOMATIC; and where it comes from.
  int64_t given_bytes;
  int64_t origin;
  // Or PENSTOCK_NONE.
  int64_t baked_bytes;
  // The terms of an automatic budget; read for no other. What is free, what weights of a loaded program hold, and of
  // these what is not for weights: what runs allocate at most, state that is still to be allocated, a reserve.
  int64_t free_bytes;
  int64_t held_bytes;
  int64_t activation_bytes;
  int64_t state_bytes;
  int64_t reserve_bytes;
  // What was chosen, and what was asked for; `origin` is then where that comes from.
  int64_t budget_bytes;
  int64_t asked_bytes;
};

// What a session does not know of itself, for the line that says what it was set up to do.
struct PenstockSummary {
  // Of the program, as people know it; and "cuda:1".
  const char* name;
  const char* device;
  int64_t floor_bytes;
  int64_t budget_bytes;
  // Of the budget, as in PenstockBudget.
  int64_t origin;
  // The least budget with which no weight is read over the link instead of copied.
  int64_t copying_bytes;
  // Names, in the order in which the session counts methods.
  const char* const* methods;
  int64_t method_count;
  // What else there is to say.
  const char* const* remarks;
  int64_t remark_count;
};

#ifdef __cplusplus
}  // extern "C"
#endif
