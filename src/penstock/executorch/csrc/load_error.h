// Why something is refused. Every failure inside the delegate is a LoadError until it reaches ExecuTorch, which knows
// only numbers. The text then goes to ExecuTorch's log, and is kept for the thread.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock_core.h"

namespace penstock_executorch {

// src/penstock/executorch/failures.py maps each to the exception class that the .pt2 path raises.
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
  host = 12,           // a file could not be written, or a library not found
  device = 13,         // there is no such device
  state = 14,          // half written by a failed run, or not found
  busy = 15,           // a run is under way
  activations = 16,    // a method found no device memory for what it computes
};

using penstock::Failure;

struct LoadError : std::runtime_error {
  LoadError(Kind kind, const std::string& text, int64_t detail = 0)
      : std::runtime_error(text), kind(kind), detail(detail) {}
  // With the core's own number.
  LoadError(Failure failure, const std::string& text) : LoadError(Kind::core, text, (int64_t)failure) {}
  bool is(Failure failure) const { return kind == Kind::core && detail == (int64_t)failure; }
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
// Makes the exception that is being handled the last refusal: none may pass through ExecuTorch or C.
const LastRefusal& keep_refusal();

// first, second
template <typename All, typename Text>
std::string joined(const All& all, Text&& text) {
  std::string out;
  for (const auto& one : all) out += (out.empty() ? "" : ", ") + text(one);
  return out;
}

// [3, 4]
std::string listed(const std::vector<int64_t>& numbers);

}  // namespace penstock_executorch
