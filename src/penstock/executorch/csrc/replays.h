// One delegate's runs as CUDA graphs: captured after the first run at each shape of the inputs, then replayed. A graph
// has its own memory for inputs and outputs, so ExecuTorch's memory is read and written outside it, wherever it lies.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "code.h"
#include "graph_memory.h"
#include "program_session.h"

namespace penstock_executorch {

using Shapes = std::vector<std::vector<int64_t>>;

class Replays {
 public:
  // All of these outlive it. `session` is the core's, whose users hold `running`; `number`: the delegate's in it.
  Replays(void* session, std::mutex& running, PlanMemory& plan_memory, int64_t number, CompiledCode& code,
          GraphMemory& memory, const std::string& method);
  ~Replays();
  Replays(const Replays&) = delete;
  Replays& operator=(const Replays&) = delete;

  // Call both under `running`. Replays a run on the inputs that the code has taken, which then has the outputs. False
  // if there is no graph for these shapes under the present plan. Throws what a run throws, after giving it up.
  bool replay(const Shapes& shapes, void* stream);
  // Call it after a run on the same inputs. Throws LoadError(core) if the run cannot be captured.
  void capture(const Shapes& shapes);

 private:
  struct Pass {
    Shapes shapes;
    // The core's number of the graph, and the code's number of its inputs and outputs.
    int64_t graph;
    int64_t tensors;
  };
  // Graphs end with the plan whose addresses they hold: the core gives its own up.
  void forget();

  void* session_;
  std::mutex& running_;
  PlanMemory& plan_memory_;
  int64_t number_;
  CompiledCode& code_;
  GraphMemory& memory_;
  std::string method_;
  // Least recently used first.
  std::list<Pass> passes_;
  int64_t next_tensors_ = 0;
};

}  // namespace penstock_executorch
