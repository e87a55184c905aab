// The native core, libpenstock.so, by its C interface: the same session that the .pt2 path runs on. It is found at run
// time, so that a process which has loaded a core already uses that one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "penstock_core.h"

namespace penstock_executorch {

struct Core {
  int32_t (*failure)();
  const char* (*failure_text)();
  uint64_t (*checksum)(const void* data, int64_t bytes);
  int32_t (*load_torch)();
  void* (*soft_create)(size_t page_bytes, size_t capacity_bytes, int32_t poison);
  const char* (*soft_error)();
  void* (*cuda_create)(int32_t ordinal);
  void (*driver_destroy)(void*);
  int32_t (*driver_granularity)(void*, int64_t*);
  int32_t (*driver_memory)(void*, int64_t* free_bytes, int64_t* total_bytes);
  int32_t (*check_build)(const PenstockBuild* built, const PenstockBuild* here);
  int64_t (*budget_origin)(int64_t given_bytes, int64_t origin, int64_t baked_bytes);
  const char* (*format_bytes)(int64_t bytes);
  int64_t (*reserve_bytes)(int64_t total_bytes, int32_t on_gpu);
  int32_t (*choose_budget)(PenstockBudget*);
  const char* (*clamp_sentence)(const PenstockBudget*);
  void* (*open)(void* driver, const PenstockOpenRequest*);
  void (*session_destroy)(void*);
  void* (*session_allocate_host)(void*, int64_t bytes);
  void (*session_free_host)(void*, void* start);
  int32_t (*session_install)(void*, const int64_t* numbers, int64_t count);
  int32_t (*session_install_with_slots)(void*, const int64_t* numbers, int64_t count, int64_t slots, int64_t slot_bytes,
                                        int64_t total_bytes);
  int32_t (*session_begin)(void*, int64_t method, void* stream);
  int32_t (*session_end)(void*);
  void (*session_abort)(void*);
  int32_t (*session_begin_capture)(void*, int64_t method, void* stream);
  int32_t (*session_end_capture)(void*, int64_t* graph);
  int32_t (*session_drop_capture)(void*, int64_t graph);
  int32_t (*session_begin_replay)(void*, int64_t graph, void* stream);
  int32_t (*session_launch)(void*);
  int32_t (*session_end_replay)(void*);
  int32_t (*session_drain)(void*);
  int32_t (*session_start_trace)(void*);
  int32_t (*session_stop_trace)(void*);
  int64_t (*session_spans)(void*, int64_t* out, int64_t capacity);
  int32_t (*session_counters)(void*, int64_t* last_run, int64_t* totals);
  int32_t (*session_memory)(void*, int64_t* device_bytes, int64_t* peak_device_bytes);
  const char* (*session_summary)(void*, const PenstockSummary*);
  int64_t (*session_link)(void*, int64_t* out, int64_t capacity);
  int32_t (*session_failure)(void*);
  const char* (*session_failure_text)(void*);
};

// Throws LoadError(host) where there is no core, or one of another release.
const Core& core();

// "1.5 GiB" where that is exact, "2.07 GiB (2218786816 bytes)" where it is not.
inline std::string format_bytes(int64_t bytes) { return core().format_bytes(bytes); }

// Of a run that has begun and failed with `error`: gives it up, and throws what the core itself has against it, which
// generated code reduces to a generic failure; else LoadError(code).
[[noreturn]] void give_run_up(void* session, const std::string& method, const std::exception& error);

// What the core's last failed call on this thread said, as a LoadError(core); throws it.
[[noreturn]] void throw_core_failure();

}  // namespace penstock_executorch
