// What CUDA graphs need from torch: memory that is theirs alone, and a stream to capture on. This header includes
// neither torch nor CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace penstock_executorch {

// The memory that the graphs of one session compute in. Replays follow one another, so all of them share it.
class GraphMemory {
 public:
  // Throws LoadError(build) if this library was built without it: it needs a torch with CUDA, and CUDA's headers.
  explicit GraphMemory(int32_t device_index);
  // Graphs and tensors in it must be gone by then.
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  // Calls `action` with the device's stream for captures, which is torch's current one meanwhile. What this thread
  // allocates in `action` lies here. One capture at a time on each device.
  void capture(const std::function<void(void* stream)>& action);
  // Calls `action`, which launches a graph on torch's current stream. The graph begins when the device is done with the
  // last graph of any program, because graphs captured on one stream may share scratch memory of torch's.
  void launch(const std::function<void()>& action);

 private:
  int32_t device_index_;
  // Number of the pool in torch's allocator.
  std::pair<uint64_t, uint64_t> pool_;
  // Each use holds the pool once more.
  int64_t uses_ = 0;
};

// Waits for all work of a device. CUDA refuses that while any stream of the device is captured, and the capture is then
// lost. So this first waits for captures to end, of whatever program.
void wait_for_device(int32_t device_index);

// The memory for a session of the core: one for all delegates that run in it.
std::shared_ptr<GraphMemory> graph_memory_of(void* session, int32_t device_index);

}  // namespace penstock_executorch
