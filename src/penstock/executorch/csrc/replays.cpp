// Captures a delegate's runs, replays them, and gives up the least recently used.
#include "replays.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

// Each holds its inputs and outputs: a decoder's growing context must not fill the memory. As in runtime/graphs.py.
constexpr size_t kRememberedPasses = 64;

}  // namespace

Replays::Replays(void* session, std::mutex& running, PlanMemory& plan_memory, int64_t number, CompiledCode& code,
                 GraphMemory& memory, const std::string& method)
    : session_(session), running_(running), plan_memory_(plan_memory), number_(number), code_(code), memory_(memory),
      method_(method) {
  std::lock_guard<std::mutex> alone(running_);
  plan_memory_[this] = [this] { forget(); };
}

Replays::~Replays() {
  // Another delegate may be running, or capturing, in another thread.
  std::lock_guard<std::mutex> alone(running_);
  plan_memory_.erase(this);
  // The memory that a graph computes in may be in use.
  if (!passes_.empty()) core().session_drain(session_);
  for (const Pass& pass : passes_) core().session_drop_capture(session_, pass.graph);
  forget();
}

void Replays::forget() {
  for (const Pass& pass : passes_) code_.drop_pass(pass.tensors);
  passes_.clear();
}

bool Replays::replay(const Shapes& shapes, void* stream) {
  auto found = std::find_if(passes_.begin(), passes_.end(), [&](const Pass& pass) { return pass.shapes == shapes; });
  if (found == passes_.end()) return false;
  passes_.splice(passes_.end(), passes_, found);
  if (core().session_begin_replay(session_, found->graph, stream)) throw_core_failure();
  try {
    code_.fill_pass(found->tensors);
    memory_.launch([&] {
      if (core().session_launch(session_)) throw_core_failure();
    });
    code_.show_pass(found->tensors);
  } catch (const std::exception& error) {
    give_run_up(session_, method_, error);
  }
  if (core().session_end_replay(session_)) throw_core_failure();
  return true;
}

void Replays::capture(const Shapes& shapes) {
  if (passes_.size() == kRememberedPasses) {
    // The memory that the graph to drop computes in may be in use.
    if (core().session_drain(session_)) throw_core_failure();
    const Pass given_up = std::move(passes_.front());
    passes_.pop_front();
    code_.drop_pass(given_up.tensors);
    if (core().session_drop_capture(session_, given_up.graph)) throw_core_failure();
  }
  // While a graph is captured, torch's allocator cannot give back what it holds unused.
  give_back_cached_memory();
  Pass pass{shapes, 0, next_tensors_++};
  code_.make_pass(pass.tensors);
  try {
    memory_.capture([&](void* stream) {
      if (core().session_begin_capture(session_, number_, stream)) throw_core_failure();
      try {
        code_.run_pass(pass.tensors, stream);
      } catch (const std::exception& error) {
        give_run_up(session_, method_, error);
      }
      if (core().session_end_capture(session_, &pass.graph)) throw_core_failure();
    });
  } catch (const std::exception& error) {
    code_.drop_pass(pass.tensors);
    // No memory, or a lost device: report that itself.
    const auto* known = dynamic_cast<const LoadError*>(&error);
    if (known && (known->is(Failure::device_memory) || known->is(Failure::sticky) || known->kind == Kind::activations)) throw;
    throw LoadError(Failure::capture,
                    "method '" + method_ + "' ran, but cannot be captured into a CUDA graph, because it does what a graph "
                    "cannot do again by itself, such as waiting for a value on the host; load it without "
                    "weight_offload_cuda_graph (" + error.what() + ")");
  }
  passes_.push_back(std::move(pass));
}

}  // namespace penstock_executorch
