// One delegate's runs as CUDA graphs: captured after the first run at each shape of the inputs, replayed from then on. A
// graph's inputs and outputs have memory of its own, so whatever memory ExecuTorch gives is read and written beside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "code.h"
#include "graph_memory.h"

namespace penstock_executorch {

using Shapes = std::vector<std::vector<int64_t>>;

class Replays {
 public:
  // All of them outlive it. `session` is the core's, and `plan_number` another one for each plan that it has had;
  // `number`: of the delegate, as its session counts.
  Replays(void* session, const std::atomic<int64_t>& plan_number, int64_t number, CompiledCode& code,
          GraphMemory& memory, const std::string& method);
  ~Replays();
  Replays(const Replays&) = delete;
  Replays& operator=(const Replays&) = delete;

  // Replays a run on the inputs that the code has taken, which then has the outputs. False where there is no graph for
  // these shapes under the present plan. Throws what a run does, and has then given it up.
  bool replay(const Shapes& shapes, void* stream);
  // After a run on the same inputs. Throws LoadError(core) where it cannot be captured.
  void capture(const Shapes& shapes);

 private:
  struct Pass {
    Shapes shapes;
    // The core's number of the graph, and the code's of its inputs and outputs.
    int64_t graph;
    int64_t tensors;
  };
  // Graphs go with the plan whose addresses they hold: the core has given its own up.
  void forget_other_plans();

  void* session_;
  const std::atomic<int64_t>& plan_number_;
  int64_t number_;
  CompiledCode& code_;
  GraphMemory& memory_;
  std::string method_;
  // The last that was used first.
  std::list<Pass> passes_;
  int64_t plan_ = -1;
  int64_t next_tensors_ = 0;
};

}  // namespace penstock_executorch
