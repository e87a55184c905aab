// Why something is refused. Every failure inside the delegate is one of these until it reaches ExecuTorch, which knows
// numbers only; the text is then in its log, and is kept for the thread.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock_executorch {

// src/penstock/executorch/failures.py gives each the exception class that the .pt2 path raises.
enum class Kind : int32_t {
  none = 0,
  package = 1,         // the .pte is damaged, or of another format
  budget = 2,          // malformed, or given twice
  below_floor = 3,
  option = 4,          // unknown, or of the wrong type
  missing_weight = 5,
  weight_mismatch = 6,
  weights_file = 7,    // not mapped, several
  build = 8,           // compiled for another torch, machine or device
  input = 9,
  core = 10,           // of the native session: its own number says more
  code = 11,           // inside the compiled code
  host = 12,           // a file could not be written, or a library not be found
  device = 13,         // there is no such device
  state = 14,          // half written by a run that failed, or not to be found
  busy = 15,           // a run is under way
};

struct LoadError : std::runtime_error {
  LoadError(Kind kind, const std::string& text, int64_t detail = 0)
      : std::runtime_error(text), kind(kind), detail(detail) {}
  Kind kind;
  int64_t detail;  // the floor, or the core's own number
};

// The last refusal on this thread.
struct LastRefusal {
  Kind kind = Kind::none;
  int64_t detail = 0;
  std::string text;
};
LastRefusal& last_refusal();


// [3, 4]
std::string listed(const std::vector<int64_t>& numbers);

}  // namespace penstock_executorch
