// Turns that are queued behind a closed gate, so that the host's own speed does not count, and timed by the GPU.
#include "cuda/stream_choice.h"

#include <atomic>
#include <thread>

namespace penstock {
namespace {

constexpr int kCaptureImplicit = 906;
constexpr unsigned kDisableTiming = 2;
constexpr int kTurns = 32;
constexpr DeviceStream kLegacy = nullptr;
constexpr char kTurnKernel[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry turn()\n{\n ret;\n}\n";

// The legacy stream waits behind it until it opens, at the latest when it goes.
class Gate {
 public:
  explicit Gate(const CudaLibrary& cuda) : cuda_(cuda) {}
  ~Gate() {
    open_ = true;
    // What was queued reads it.
    if (closed_) cuda_.synchronize(kLegacy);
  }
  int close() {
    int code = cuda_.launch_host_function(kLegacy, &Gate::hold, this);
    closed_ = code == 0;
    return code;
  }
  void open() { open_ = true; }

 private:
  static void hold(void* gate) {
    while (!static_cast<Gate*>(gate)->open_) std::this_thread::yield();
  }

  const CudaLibrary& cuda_;
  std::atomic<bool> open_{false};
  bool closed_ = false;
};

class Turns {
 public:
  explicit Turns(const CudaLibrary& cuda) : cuda_(cuda) {}
  ~Turns() {
    for (void* event : {began_, ended_, here_, there_})
      if (event) cuda_.event_destroy(event);
    if (module_) cuda_.module_unload(module_);
  }

  CudaOutcome prepare() {
    if (int code = cuda_.module_load(&module_, kTurnKernel)) return {code, "cuModuleLoadData"};
    if (int code = cuda_.module_function(&kernel_, module_, "turn")) return {code, "cuModuleGetFunction"};
    for (void** event : {&began_, &ended_})
      if (int code = cuda_.event_create(event, 0)) return {code, "cuEventCreate"};
    for (void** event : {&here_, &there_})
      if (int code = cuda_.event_create(event, kDisableTiming)) return {code, "cuEventCreate"};
    return {0, ""};
  }

  CudaOutcome take(DeviceStream stream, float* milliseconds) {
    {
      Gate gate(cuda_);
      if (int code = gate.close()) return {code, "cuLaunchHostFunc"};
      if (int code = cuda_.event_record(began_, kLegacy)) return {code, "cuEventRecord"};
      for (int turn = 0; turn < kTurns; ++turn) {
        if (CudaOutcome outcome = follow(kLegacy, here_, stream); outcome.code) return outcome;
        if (CudaOutcome outcome = follow(stream, there_, kLegacy); outcome.code) return outcome;
      }
      if (int code = cuda_.event_record(ended_, kLegacy)) return {code, "cuEventRecord"};
      gate.open();
      if (int code = cuda_.event_synchronize(ended_)) return {code, "cuEventSynchronize"};
    }
    return {cuda_.event_elapsed(milliseconds, began_, ended_), "cuEventElapsedTime"};
  }

 private:
  // A kernel on the one, for which the other waits.
  CudaOutcome follow(DeviceStream first, void* event, DeviceStream second) {
    CudaLaunchConfig config{};
    for (unsigned* size : {config.grid, config.block}) size[0] = size[1] = size[2] = 1;
    config.stream = first;
    if (int code = cuda_.launch_kernel(&config, kernel_, nullptr, nullptr)) return {code, "cuLaunchKernelEx"};
    if (int code = cuda_.event_record(event, first)) return {code, "cuEventRecord"};
    return {cuda_.stream_wait(second, event, 0), "cuStreamWaitEvent"};
  }

  const CudaLibrary& cuda_;
  void* module_ = nullptr;
  void* kernel_ = nullptr;
  void *began_ = nullptr, *ended_ = nullptr, *here_ = nullptr, *there_ = nullptr;
};

CudaOutcome choose(const CudaLibrary& cuda, const std::vector<DeviceStream>& streams, size_t* out) {
  Turns turns(cuda);
  if (CudaOutcome outcome = turns.prepare(); outcome.code) return outcome;
  // A stream gets its front end when it is first used: all are, before one is timed.
  float milliseconds = 0, least = 0;
  for (DeviceStream stream : streams)
    if (CudaOutcome outcome = turns.take(stream, &milliseconds); outcome.code) return outcome;
  for (size_t i = 0; i < streams.size(); ++i) {
    if (CudaOutcome outcome = turns.take(streams[i], &milliseconds); outcome.code) return outcome;
    if (i && milliseconds >= least) continue;
    least = milliseconds;
    *out = i;
  }
  return {0, ""};
}

}  // namespace

CudaOutcome choose_stream(const CudaLibrary& cuda, const std::vector<DeviceStream>& streams, size_t* out) {
  *out = 0;
  CudaOutcome outcome = choose(cuda, streams, out);
  if (outcome.code == kCaptureImplicit) {
    *out = 0;
    return {0, ""};
  }
  return outcome;
}

}  // namespace penstock
