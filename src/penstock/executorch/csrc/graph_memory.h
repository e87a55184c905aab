// What CUDA graphs need of torch: memory that is theirs alone, and a stream to capture on. This header knows neither
// torch nor CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace penstock_executorch {

// The memory that the graphs of one session compute in. Replays follow one another, so all of them share it.
class GraphMemory {
 public:
  // Throws LoadError(build) where this library was built without: it takes a torch with CUDA, and CUDA's headers.
  explicit GraphMemory(int32_t device_index);
  // Graphs and tensors in it must be gone.
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  // Calls `action` with the device's stream for captures, as torch's current one; what this thread allocates meanwhile
  // lies here. One at a time on each device.
  void capture(const std::function<void(void* stream)>& action);
  // Calls `action`, which launches a graph on torch's current stream, where it begins when the device is done with the
  // last one, of any program: graphs that were captured on one stream may have scratch memory of torch's in common.
  void launch(const std::function<void()>& action);

 private:
  int32_t device_index_;
  // Of torch's pools.
  std::pair<uint64_t, uint64_t> pool_;
  // Each holds the pool once more.
  int64_t uses_ = 0;
};

// Of a session of the core: one for all delegates that run in it.
std::shared_ptr<GraphMemory> graph_memory_of(void* session, int32_t device_index);

}  // namespace penstock_executorch
