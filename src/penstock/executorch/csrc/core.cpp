// Finds the core and its functions, and turns its failures into exceptions.
#include "core.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "load_error.h"

namespace penstock_executorch {
namespace {

// Where the environment says; else above this library's folder; else where the core was when this was built.
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
#define PENSTOCK_FIND(name) find(library, "penstock_" #name, core.name);
  PENSTOCK_CORE_FUNCTIONS(PENSTOCK_FIND)
#undef PENSTOCK_FIND
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
  if (failure) throw LoadError((Failure)failure, text);
  if (const auto* refusal = dynamic_cast<const LoadError*>(&error)) throw *refusal;
  throw LoadError(Kind::code, "method '" + method + "' failed inside its compiled code: " + error.what());
}

void throw_core_failure() { throw LoadError((Failure)core().failure(), core().failure_text()); }

}  // namespace penstock_executorch
