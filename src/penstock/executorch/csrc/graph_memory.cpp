// Owns a pool of torch's allocator for graphs, and each device's stream to capture on.
#include "graph_memory.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <thread>

#include "code.h"
#include "load_error.h"

#ifdef PENSTOCK_TORCH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace penstock_executorch {
namespace {

using PoolId = std::pair<uint64_t, uint64_t>;

#ifdef PENSTOCK_TORCH_CUDA

namespace torch_memory = c10::cuda::CUDACachingAllocator;

PoolId new_pool() { return at::cuda::graph_pool_handle(); }

void begin_pool(int32_t device_index, PoolId pool) {
  const std::thread::id self = std::this_thread::get_id();
  torch_memory::beginAllocateToPool((c10::DeviceIndex)device_index, pool,
                                    [self](cudaStream_t) { return std::this_thread::get_id() == self; });
}

void end_pool(int32_t device_index, PoolId pool) { torch_memory::endAllocateToPool((c10::DeviceIndex)device_index, pool); }

void release_pool(int32_t device_index, PoolId pool) { torch_memory::releasePool((c10::DeviceIndex)device_index, pool); }

#else

PoolId new_pool() {
  throw LoadError(Kind::build, "weight_offload_cuda_graph needs memory of torch's that this library was built without: build "
                               "it where torch has CUDA and CUDA's headers are found (in CUDA_HOME, or beside torch as "
                               "nvidia-cuda-runtime and triton bring them), with python -m penstock.executorch.build");
}
void begin_pool(int32_t, PoolId) {}
void end_pool(int32_t, PoolId) {}
void release_pool(int32_t, PoolId) {}

#endif

struct CaptureStream {
  explicit CaptureStream(c10::Stream stream) : stream(stream), launched(c10::kCUDA) {}
  c10::Stream stream;
  std::mutex alone;
  // Held from the wait for `launched` to its record: a launch of another thread in between would wait for nobody.
  std::mutex launching;
  // Recorded after the last launch.
  c10::Event launched;
};

// One for each device, forever: torch keeps a workspace for each stream that products ran on, 32 MiB on a large GPU,
// until the process ends.
CaptureStream& capture_stream(int32_t device_index) {
  static std::mutex lock;
  static auto* made = new std::map<int32_t, CaptureStream>;
  std::lock_guard<std::mutex> hold(lock);
  auto found = made->find(device_index);
  if (found != made->end()) return found->second;
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Device device(c10::kCUDA, (c10::DeviceIndex)device_index);
  return made->try_emplace(device_index, guard.getStreamFromGlobalPool(device)).first->second;
}

}  // namespace

GraphMemory::GraphMemory(int32_t device_index) : device_index_(device_index), pool_(new_pool()) {}

GraphMemory::~GraphMemory() {
  for (; uses_ > 0; --uses_) release_pool(device_index_, pool_);
}

void GraphMemory::capture(const std::function<void(void* stream)>& action) {
  CaptureStream& on = capture_stream(device_index_);
  std::lock_guard<std::mutex> alone(on.alone);
  c10::StreamGuard as_current(on.stream);
  begin_pool(device_index_, pool_);
  uses_++;
  struct Ends {
    const GraphMemory& memory;
    ~Ends() { end_pool(memory.device_index_, memory.pool_); }
  } ends{*this};
  action(current_stream("cuda", device_index_));
}

void GraphMemory::launch(const std::function<void()>& action) {
  CaptureStream& on = capture_stream(device_index_);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(on.stream.device());
  std::lock_guard<std::mutex> alone(on.launching);
  on.launched.block(stream);
  try {
    action();
  } catch (...) {
    on.launched.record(stream);
    throw;
  }
  on.launched.record(stream);
}

void wait_for_device(int32_t device_index) {
  std::lock_guard<std::mutex> alone(capture_stream(device_index).alone);
  at::detail::getCUDAHooks().deviceSynchronize((c10::DeviceIndex)device_index);
}

std::shared_ptr<GraphMemory> graph_memory_of(void* session, int32_t device_index) {
  static std::mutex lock;
  static auto* known = new std::map<void*, std::weak_ptr<GraphMemory>>;
  std::lock_guard<std::mutex> hold(lock);
  std::weak_ptr<GraphMemory>& kept = (*known)[session];
  std::shared_ptr<GraphMemory> found = kept.lock();
  if (!found) kept = found = std::make_shared<GraphMemory>(device_index);
  return found;
}

}  // namespace penstock_executorch
