// The native core, libpenstock.so, through its C interface: the same session that the .pt2 path runs on. It is found at
// run time, so a process that has already loaded a core uses that one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "penstock_core.h"

namespace penstock_executorch {

// The functions of penstock_core.h that are used here, without the "penstock_".
#define PENSTOCK_CORE_FUNCTIONS(each)                                                                                  \
  each(failure) each(failure_text) each(checksum) each(load_torch) each(soft_create) each(soft_error)                  \
  each(cuda_create) each(driver_destroy) each(driver_granularity) each(driver_memory) each(check_build)                \
  each(budget_origin) each(format_bytes) each(parse_bytes) each(reserve_bytes) each(choose_budget)                     \
  each(clamp_sentence) each(open) each(session_destroy) each(session_allocate_host) each(session_free_host)            \
  each(session_install) each(session_install_with_slots) each(session_begin) each(session_end) each(session_abort)     \
  each(session_begin_capture) each(session_end_capture) each(session_drop_capture) each(session_begin_replay)          \
  each(session_launch) each(session_end_replay) each(session_drain) each(session_start_trace)                          \
  each(session_stop_trace) each(session_spans) each(session_counters) each(session_memory) each(session_link)          \
  each(session_summary) each(session_failure) each(session_failure_text)

struct Core {
#define PENSTOCK_MEMBER(name) decltype(&penstock_##name) name;
  PENSTOCK_CORE_FUNCTIONS(PENSTOCK_MEMBER)
#undef PENSTOCK_MEMBER
};

// Throws LoadError(host) where there is no core, or one of another release.
const Core& core();

// "1.5 GiB" where that is exact, "2.07 GiB (2218786816 bytes)" where it is not.
inline std::string format_bytes(int64_t bytes) { return core().format_bytes(bytes); }

// Gives up a run that has begun and failed with `error`. Throws the core's own failure, which generated code reduces to
// a generic one; if the core has none, LoadError(code).
[[noreturn]] void give_run_up(void* session, const std::string& method, const std::exception& error);

// Throws what the core's last failed call on this thread said, as a LoadError(core).
[[noreturn]] void throw_core_failure();

}  // namespace penstock_executorch
