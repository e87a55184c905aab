// choose_stream over a made-up libcuda: streams that take turns at given speeds, and every call made to fail in turn.
#include "cuda/stream_choice.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

using namespace penstock;

namespace {

const float kSpeeds[] = {6.8f, 3.5f, 6.9f, 3.4f, 3.4f};
int calls = 0, fails_at = 0, fails_with = 0, taken = 0;
int live_events = 0, live_modules = 0, launches = 0, unordered = 0;
float last_ms = 0;
bool closed = false;
std::thread held;

int count() { return ++calls == fails_at ? fails_with : 0; }

int64_t number_of(DeviceStream stream) { return (int64_t)stream - 1; }

CudaLibrary made_up() {
  CudaLibrary cuda;
  cuda.module_load = [](void** out, const void*) {
    if (int code = count()) return code;
    live_modules++;
    *out = &live_modules;
    return 0;
  };
  cuda.module_unload = [](void*) { return live_modules--, 0; };
  cuda.module_function = [](void** out, void*, const char*) { return *out = &launches, count(); };
  cuda.event_create = [](void** out, unsigned) {
    if (int code = count()) return code;
    live_events++;
    *out = &live_events;
    return 0;
  };
  cuda.event_destroy = [](void*) { return live_events--, 0; };
  cuda.launch_host_function = [](DeviceStream, void (*function)(void*), void* argument) {
    if (int code = count()) return code;
    held = std::thread(function, argument);
    closed = true;
    return 0;
  };
  cuda.event_record = [](void*, DeviceStream) { return count(); };
  cuda.launch_kernel = [](const CudaLaunchConfig* config, void*, void**, void**) {
    launches++;
    unordered += !closed;
    if (config->stream) last_ms = kSpeeds[number_of(config->stream)];
    return count();
  };
  cuda.stream_wait = [](DeviceStream, void*, unsigned) { return count(); };
  // Both wait for the gate: one that nobody opens would hang here.
  cuda.synchronize = [](DeviceStream) {
    if (held.joinable()) held.join();
    closed = false;
    return 0;
  };
  cuda.event_synchronize = [](void*) {
    if (held.joinable()) held.join();
    closed = false;
    return count();
  };
  cuda.event_elapsed = [](float* out, void*, void*) {
    taken++;
    *out = last_ms;
    return count();
  };
  return cuda;
}

std::vector<DeviceStream> streams(int64_t first, int64_t last) {
  std::vector<DeviceStream> made;
  for (int64_t i = first; i <= last; ++i) made.push_back((DeviceStream)(i + 1));
  return made;
}

void require(bool met, const char* what) {
  if (met) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

}  // namespace

int main() {
  CudaLibrary cuda = made_up();
  size_t chosen = 9;
  require(choose_stream(cuda, streams(0, 4), &chosen).code == 0 && chosen == 3, "not the first of the fastest");
  require(taken == 10, "not every stream was used before one was timed");
  require(choose_stream(cuda, streams(0, 2), &chosen).code == 0 && chosen == 1, "not the fastest");
  require(unordered == 0, "a turn was not held back");
  calls = 0;
  require(choose_stream(cuda, streams(0, 1), &chosen).code == 0, "failed");
  const int all = calls;
  for (fails_at = 1; fails_at <= all; ++fails_at) {
    for (int code : {2, 906}) {
      calls = 0, fails_with = code, chosen = 9;
      CudaOutcome outcome = choose_stream(cuda, streams(0, 1), &chosen);
      require(outcome.code == (code == 906 ? 0 : code) && chosen == 0, "a failure was told wrong");
      require(!outcome.code || outcome.call[0] == 'c', "a failure without its call");
      require(!live_events && !live_modules && !held.joinable(), "something was left");
    }
  }
  std::printf("%d\n", all);
}
