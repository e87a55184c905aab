#include "replays.h"

#include <algorithm>
#include <exception>
#include <optional>

#include "core.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

// Each holds its inputs and outputs: a decoder's growing context must not fill the memory. As in runtime/graphs.py.
constexpr size_t kRememberedPasses = 64;

// As the core counts its failures: these are told as they are, whatever they ended.
constexpr int64_t kDeviceMemory = 2, kSticky = 6, kCapture = 7;

}  // namespace

Replays::Replays(void* session, const std::atomic<int64_t>& plan_number, int64_t number, CompiledCode& code,
                 GraphMemory& memory, const std::string& method)
    : session_(session), plan_number_(plan_number), number_(number), code_(code), memory_(memory), method_(method) {}

Replays::~Replays() {
  // What a graph computes in may be in use.
  if (!passes_.empty()) core().session_drain(session_);
  for (const Pass& pass : passes_) {
    code_.drop_pass(pass.tensors);
    if (plan_ == plan_number_) core().session_drop_capture(session_, pass.graph);
  }
}

void Replays::forget_other_plans() {
  if (plan_ == plan_number_) return;
  for (const Pass& pass : passes_) code_.drop_pass(pass.tensors);
  passes_.clear();
  plan_ = plan_number_;
}

bool Replays::replay(const Shapes& shapes, void* stream) {
  forget_other_plans();
  auto found = std::find_if(passes_.begin(), passes_.end(), [&](const Pass& pass) { return pass.shapes == shapes; });
  if (found == passes_.end()) return false;
  passes_.splice(passes_.end(), passes_, found);
  if (core().session_begin_replay(session_, found->graph, stream)) throw_core_failure();
  try {
    code_.fill_pass(found->tensors);
    if (core().session_launch(session_)) throw_core_failure();
    code_.show_pass(found->tensors);
  } catch (const std::exception& error) {
    give_run_up(session_, method_, error);
  }
  if (core().session_end_replay(session_)) throw_core_failure();
  return true;
}

void Replays::capture(const Shapes& shapes) {
  forget_other_plans();
  if (passes_.size() == kRememberedPasses) {
    // The memory that the one given up computes in may be in use.
    if (core().session_drain(session_)) throw_core_failure();
    code_.drop_pass(passes_.front().tensors);
    if (core().session_drop_capture(session_, passes_.front().graph)) throw_core_failure();
    passes_.pop_front();
  }
  // While a graph is captured, torch's allocator cannot give back what it holds unused.
  give_back_cached_memory();
  const int64_t tensors = next_tensors_++;
  Pass pass{shapes, 0, tensors};
  try {
    code_.make_pass(tensors);
    memory_.capture([&](void* stream) {
      if (core().session_begin_capture(session_, number_, stream)) throw_core_failure();
      try {
        code_.run_pass(tensors, stream);
      } catch (const std::exception& error) {
        give_run_up(session_, method_, error);
      }
      if (core().session_end_capture(session_, &pass.graph)) throw_core_failure();
    });
  } catch (const std::exception& error) {
    code_.drop_pass(tensors);
    const auto* refusal = dynamic_cast<const LoadError*>(&error);
    if (refusal && refusal->kind == Kind::core && (refusal->detail == kDeviceMemory || refusal->detail == kSticky)) throw;
    throw LoadError(Kind::core, "method '" + method_ +
                                  "' ran, but cannot be captured into a CUDA graph, because it does what a graph cannot "
                                  "do again by itself, such as waiting for a value on the host; load it without "
                                  "weight_offload_cuda_graph (" + error.what() + ")", kCapture);
  }
  passes_.push_back(std::move(pass));
}

}  // namespace penstock_executorch
