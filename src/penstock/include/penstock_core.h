// The part of the core's C interface that the ExecuTorch delegate uses, and all structures that it passes. Python has
// the same fields in runtime/session.py and runtime/budget_choice.py, and the functions in native.py. What the
// functions do is documented where they are defined.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// What went wrong, as the front ends tell it apart.
enum class Failure : int32_t {
  none = 0,
  driver = 1,             // a driver call failed
  device_memory = 2,      // a driver call failed for want of device memory
  registration = 3,       // host memory could not be registered or pinned
  divergence = 4,         // the compiled code did not follow the schedule
  host_read = 5,          // bytes of the weights file could not be read
  sticky = 6,             // the device context is lost; nothing more can be done with it
  capture = 7,            // called while the caller's stream is being captured
  torch = 8,              // torch refused to make a tensor
  usage = 9,              // the caller broke the order of calls
  kernel = 10,            // no kernel could be prepared
  budget = 11,            // malformed; or none was given, and there is no automatic one
  below_floor = 12,       // a budget is less than the program needs
  host_memory = 13,       // less is left than is needed, or than a cap allows
  build = 14,             // a program was compiled for something else
};

}  // namespace penstock

extern "C" {

struct PenstockOpenRequest {
  // The weights file.
  const char* path;
  // Offset and size of each weight in the file, in the order in which plans number weights.
  const int64_t* extents;
  int64_t extent_count;
  // Size of the pinned buffers that weights pass through; -1: the file is registered as it is mapped.
  int64_t host_cap_bytes;
  // What else will be held in host memory: state, and the soft driver's device memory, which is host memory too.
  int64_t extra_host_bytes;
  // The records of the weights that are packed in the file, if there are any.
  const int64_t* packed;
  int64_t packed_count;
  // Holds proc/ and sys/, which tell the limits of memory; "/" except in tests.
  const char* root;
  // What penstock_probe_begin returned. If null, a probe is begun where one is needed.
  void* probe;
  // Called with how many more bytes of the file are in memory; a nonzero result gives up. May be null.
  int32_t (*on_bytes)(int64_t bytes);
  // The policy: 0 is a plan.
  int32_t lru;
  int32_t device_index;
  int32_t poison;
};

// What a program was compiled for, or what this machine has. Compiled code calls torch and the machine directly.
struct PenstockBuild {
  const char* torch;
  // As uname has it.
  const char* machine;
  // What torch calls the instructions of the CPU.
  const char* cpu;
  // Compute capability of a GPU, as in "9.0"; null: none is compared.
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
  // The terms of an automatic budget; read for no other. What is free and what weights of a loaded program hold; and
  // the parts of these that are not for weights: the most that runs allocate, state not yet allocated, a reserve.
  int64_t free_bytes;
  int64_t held_bytes;
  int64_t activation_bytes;
  int64_t state_bytes;
  int64_t reserve_bytes;
  // The results: what was chosen, and what was asked for. `origin` then says where that comes from.
  int64_t budget_bytes;
  int64_t asked_bytes;
};

// What a session does not know about itself, for the line that says what it was set up to do.
struct PenstockSummary {
  // The program's name for people, and the device, as in "cuda:1".
  const char* name;
  const char* device;
  int64_t floor_bytes;
  int64_t budget_bytes;
  // Where the budget comes from, as in PenstockBudget.
  int64_t origin;
  // The smallest budget at which no weight is read over the link instead of copied.
  int64_t copying_bytes;
  // Names, in the order in which the session numbers methods.
  const char* const* methods;
  int64_t method_count;
  // Further parts of the line.
  const char* const* remarks;
  int64_t remark_count;
};

// Counters of the last run, or of all runs. In Python this is penstock.runtime.session.Stats.
struct PenstockCounters {
  int64_t runs = 0;
  int64_t bytes_streamed = 0;
  int64_t bytes_hit = 0;
  int64_t copies = 0;
  int64_t stall_ns = 0;
  // Under the least-recently-used policy: calls of the memory pool, and the host time they took.
  int64_t pool_calls = 0;
  int64_t pool_ns = 0;
  // Runs that were launched as a graph. Their stalls are not measured.
  int64_t replays = 0;
  // Weights that kernels read in host memory, whole or except for their prefix: all bytes that they could have read. A
  // gather reads only some rows.
  int64_t bytes_in_place = 0;
  // Packed weights: the bytes that were decoded, counted unpacked.
  int64_t bytes_decoded = 0;
  // Experts with slots, counted by the device once for each call that asks for one: those that were in a slot, those
  // that were not, and the bytes of the latter that crossed the link.
  int64_t expert_hits = 0;
  int64_t expert_misses = 0;
  int64_t expert_bytes = 0;
};

int32_t penstock_failure();
const char* penstock_failure_text();
uint64_t penstock_checksum(const void* data, int64_t bytes);
int32_t penstock_load_torch();
void* penstock_soft_create(size_t page_bytes, size_t capacity_bytes, int32_t poison);
const char* penstock_soft_error();
void* penstock_cuda_create(int32_t ordinal);
void penstock_driver_destroy(void* driver);
int32_t penstock_driver_granularity(void* driver, int64_t* bytes);
int32_t penstock_driver_memory(void* driver, int64_t* free_bytes, int64_t* total_bytes);
int32_t penstock_check_build(const PenstockBuild* built, const PenstockBuild* here);
int64_t penstock_budget_origin(int64_t given_bytes, int64_t origin, int64_t baked_bytes);
const char* penstock_format_bytes(int64_t bytes);
int32_t penstock_parse_bytes(const char* text, int64_t* bytes);
int64_t penstock_reserve_bytes(int64_t total_bytes, int32_t on_gpu);
int32_t penstock_choose_budget(PenstockBudget* budget);
const char* penstock_clamp_sentence(const PenstockBudget* budget);
void* penstock_open(void* driver, const PenstockOpenRequest* asked);
void penstock_session_destroy(void* session);
void* penstock_session_allocate_host(void* session, int64_t bytes);
void penstock_session_free_host(void* session, void* start);
int32_t penstock_session_install(void* session, const int64_t* numbers, int64_t count);
int32_t penstock_session_install_with_slots(void* session, const int64_t* numbers, int64_t count, int64_t slots,
                                            int64_t slot_bytes, int64_t total_bytes);
int32_t penstock_session_begin(void* session, int64_t method, void* stream);
int32_t penstock_session_end(void* session);
void penstock_session_abort(void* session);
int32_t penstock_session_begin_capture(void* session, int64_t method, void* stream);
int32_t penstock_session_end_capture(void* session, int64_t* capture);
int32_t penstock_session_drop_capture(void* session, int64_t capture);
int32_t penstock_session_begin_replay(void* session, int64_t capture, void* stream);
int32_t penstock_session_launch(void* session);
int32_t penstock_session_end_replay(void* session);
int32_t penstock_session_drain(void* session);
int32_t penstock_session_start_trace(void* session);
int32_t penstock_session_stop_trace(void* session);
int64_t penstock_session_spans(void* session, int64_t* out, int64_t capacity);
int32_t penstock_session_counters(void* session, PenstockCounters* last_run, PenstockCounters* totals);
int32_t penstock_session_memory(void* session, int64_t* device_bytes, int64_t* peak_device_bytes);
int64_t penstock_session_link(void* session, int64_t* out, int64_t capacity);
const char* penstock_session_summary(void* session, const PenstockSummary* asked);
int32_t penstock_session_failure(void* session);
const char* penstock_session_failure_text(void* session);

}  // extern "C"
