#include "core.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "load_error.h"

namespace penstock_executorch {
namespace {

// Where the environment says; else beside the package's folder of this library; else where it was when this was built.
std::string library_path() {
  if (const char* named = std::getenv("PENSTOCK_CORE_LIBRARY")) return named;
  Dl_info self;
  if (!dladdr(reinterpret_cast<void*>(&library_path), &self) || !self.dli_fname)
    throw LoadError(Kind::host, "this library cannot find its own place");
  std::string path = self.dli_fname;
  size_t slash = path.rfind('/');
  std::string beside = (slash == std::string::npos ? std::string(".") : path.substr(0, slash)) + "/../libpenstock.so";
  return access(beside.c_str(), R_OK) == 0 ? beside : PENSTOCK_CORE_PATH;
}

void* open_core() {
  // Global: compiled programs find the fetch function in the global scope.
  if (dlsym(RTLD_DEFAULT, "penstock_open")) return RTLD_DEFAULT;
  std::string path = library_path();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    const char* reason = dlerror();
    throw LoadError(Kind::host, "the native core cannot be loaded (set PENSTOCK_CORE_LIBRARY to where it is): " +
                                  std::string(reason ? reason : path.c_str()));
  }
  return library;
}

template <typename Function>
void find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(dlsym(library, name));
  if (!out) throw LoadError(Kind::host, std::string("the native core has no function ") + name);
}

Core load() {
  void* library = open_core();
  Core core;
  find(library, "penstock_failure", core.failure);
  find(library, "penstock_failure_text", core.failure_text);
  find(library, "penstock_checksum", core.checksum);
  find(library, "penstock_load_torch", core.load_torch);
  find(library, "penstock_soft_create", core.soft_create);
  find(library, "penstock_soft_error", core.soft_error);
  find(library, "penstock_cuda_create", core.cuda_create);
  find(library, "penstock_driver_destroy", core.driver_destroy);
  find(library, "penstock_driver_granularity", core.driver_granularity);
  find(library, "penstock_driver_memory", core.driver_memory);
  find(library, "penstock_check_build", core.check_build);
  find(library, "penstock_budget_origin", core.budget_origin);
  find(library, "penstock_format_bytes", core.format_bytes);
  find(library, "penstock_reserve_bytes", core.reserve_bytes);
  find(library, "penstock_choose_budget", core.choose_budget);
  find(library, "penstock_clamp_sentence", core.clamp_sentence);
  find(library, "penstock_open", core.open);
  find(library, "penstock_session_destroy", core.session_destroy);
  find(library, "penstock_session_allocate_host", core.session_allocate_host);
  find(library, "penstock_session_free_host", core.session_free_host);
  find(library, "penstock_session_install", core.session_install);
  find(library, "penstock_session_install_with_slots", core.session_install_with_slots);
  find(library, "penstock_session_begin", core.session_begin);
  find(library, "penstock_session_end", core.session_end);
  find(library, "penstock_session_abort", core.session_abort);
  find(library, "penstock_session_begin_capture", core.session_begin_capture);
  find(library, "penstock_session_end_capture", core.session_end_capture);
  find(library, "penstock_session_drop_capture", core.session_drop_capture);
  find(library, "penstock_session_begin_replay", core.session_begin_replay);
  find(library, "penstock_session_launch", core.session_launch);
  find(library, "penstock_session_end_replay", core.session_end_replay);
  find(library, "penstock_session_drain", core.session_drain);
  find(library, "penstock_session_start_trace", core.session_start_trace);
  find(library, "penstock_session_stop_trace", core.session_stop_trace);
  find(library, "penstock_session_spans", core.session_spans);
  find(library, "penstock_session_counters", core.session_counters);
  find(library, "penstock_session_memory", core.session_memory);
  find(library, "penstock_session_summary", core.session_summary);
  find(library, "penstock_session_link", core.session_link);
  find(library, "penstock_session_failure", core.session_failure);
  find(library, "penstock_session_failure_text", core.session_failure_text);
  return core;
}

}  // namespace

const Core& core() {
  static const Core loaded = load();
  return loaded;
}

void give_run_up(void* session, const std::string& method, const std::exception& error) {
  const int32_t failure = core().session_failure(session);
  const std::string text = core().session_failure_text(session);
  core().session_abort(session);
  if (failure) throw LoadError(Kind::core, text, failure);
  if (const auto* refusal = dynamic_cast<const LoadError*>(&error)) throw *refusal;
  throw LoadError(Kind::code, "method '" + method + "' failed inside its compiled code: " + error.what());
}

void throw_core_failure() { throw LoadError(Kind::core, core().failure_text(), core().failure()); }

}  // namespace penstock_executorch
