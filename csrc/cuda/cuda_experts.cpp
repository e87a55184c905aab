// Loads and launches the PTX of these kernels.
#include "cuda/cuda_experts.h"

namespace penstock {
namespace {

constexpr char kPtx[] =
#include "experts/experts_ptx.inc"
    ;

constexpr int kMultiprocessorCount = 16;
constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
// Thread blocks per multiprocessor: enough for the reads in flight over a link, and for device memory.
constexpr unsigned kBlocksEach = 4;

}  // namespace

CudaOutcome CudaExperts::load(int device) {
  if (module_) return {0, ""};
  int multiprocessors = 0;
  if (int code = cuda_.device_attribute(&multiprocessors, kMultiprocessorCount, device))
    return {code, "cuDeviceGetAttribute"};
  blocks_ = (unsigned)multiprocessors * kBlocksEach;
  if (int code = cuda_.module_load(&module_, kPtx)) {
    module_ = nullptr;
    return {code, "cuModuleLoadData"};
  }
  const struct {
    void** function;
    const char* name;
  } functions[] = {{&choose_, "penstock_choose_experts"},
                   {&move_rows_, "penstock_move_rows"},
                   {&move_groups_, "penstock_move_groups"},
                   {&shift_rows_, "penstock_shift_rows"}};
  int code = 0;
  for (const auto& wanted : functions)
    if (!code) code = cuda_.module_function(wanted.function, module_, wanted.name);
  if (code) unload();
  return {code, "cuModuleGetFunction"};
}

void CudaExperts::unload() noexcept {
  if (module_) cuda_.module_unload(module_);
  module_ = nullptr;
}

CudaOutcome CudaExperts::choose(const ChooseCall& call, DeviceStream stream) const {
  return launch(choose_, &call, 1, kWarp, stream);
}

CudaOutcome CudaExperts::move(const MoveCall& call, DeviceStream stream) const {
  return launch(call.by_ends ? move_groups_ : move_rows_, &call, blocks_, kThreads, stream);
}

CudaOutcome CudaExperts::shift(const ShiftCall& call, DeviceStream stream) const {
  return launch(shift_rows_, &call, blocks_, kThreads, stream);
}

CudaOutcome CudaExperts::launch(void* function, const void* call, unsigned blocks, unsigned threads,
                                DeviceStream stream) const {
  CudaLaunchConfig config{};
  config.grid[0] = blocks;
  config.block[0] = threads;
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.stream = stream;
  // The driver copies the parameters before it returns.
  void* arguments[] = {const_cast<void*>(call)};
  return {cuda_.launch_kernel(&config, function, arguments, nullptr), "cuLaunchKernelEx"};
}

}  // namespace penstock
