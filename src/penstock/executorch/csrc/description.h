// What the delegates of a program share: its weights, states and methods, and which plans were made for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace penstock {
class RecordReader;
}

namespace penstock_executorch {

struct WeightFacts {
  std::string name;
  // All names of a tied weight; the first is `name`.
  std::vector<std::string> names;
  int64_t scalar_type;
  std::vector<int64_t> shape;
  std::vector<int64_t> dim_order;
  int64_t bytes;
};

// The first so many of ExecuTorch's scalar types are integers.
constexpr int64_t kWholeNumberTypes = 5;

// A Python slice of one dimension.
struct IndexSlice {
  int64_t begin;
  int64_t end;
  int64_t step;
};

// Values in an input that index a table or a cache: each is at least `low` and below `high`.
struct IndexFacts {
  int64_t low;
  int64_t high;
  std::string table;
  int64_t dim;
  int64_t size;
  // One slice per dimension of the input; empty: all of it.
  std::vector<IndexSlice> region;
};

struct InputFacts {
  std::string name;
  int64_t scalar_type;
  std::vector<int64_t> shape;  // -1: dynamic
  std::vector<int64_t> dim_order;
  std::vector<IndexFacts> indexes;
};

// A mutated buffer, shared by the delegates of all methods.
struct StateFacts {
  std::string name;
  int64_t scalar_type;
  std::vector<int64_t> shape;
  std::vector<int64_t> dim_order;
  int64_t bytes;
  // Whether the weights file must hold its initial value; else it starts as zeros, unless the file has a value.
  bool is_stored;
};

struct MethodFacts {
  std::string name;
  // Numbers of Description::states that the code takes before its inputs, and writes.
  std::vector<int64_t> states;
  std::vector<InputFacts> inputs;
  int64_t outputs;
  // The most that inputs and outputs take together; TransferMemory holds them.
  int64_t transfer_bytes;
};

// Slots that packed weights pass through on their way over the link: a range beyond those of a plan, divided evenly.
struct Slots {
  int64_t count = 0;
  int64_t bytes = 0;
  // Of all slots, in whole pages.
  int64_t total_bytes = 0;
};

// A plan made at export. It fits every budget of `device_bytes` or more.
struct StoredPlan {
  // Including the slots.
  int64_t device_bytes;
  // Whether every run copies something.
  bool is_copying;
  size_t count;
  uint64_t seal;
  // Not aligned, because it is a part of the payload.
  const char* numbers = nullptr;
  // None, where weights are as they are; the plan in the file has none.
  Slots slots{};
};

// The plans of some of the program's delegates over one ring.
struct PlanTable {
  // Numbers of Description::methods, in the order in which a session counts them.
  std::vector<int64_t> methods;
  // Numbers of Description::weights that some plan reads in place in host memory, which staging cannot do.
  std::vector<int64_t> in_place;
  int64_t floor_bytes;
  int64_t full_bytes;
  // Below this, weights are read over the link instead of copied. 0: this does not depend on the budget.
  int64_t copying_bytes;
  // Smallest first.
  std::vector<StoredPlan> plans;
};

struct Description {
  std::string program;
  std::string device;
  int64_t page_bytes;
  std::optional<int64_t> baked_bytes;
  std::optional<int64_t> activation_bytes;
  // What it was built with.
  std::string torch;
  std::string machine;
  std::string cpu;
  // Only for a GPU: its compute capability, as in "9.0", and its name.
  std::string capability;
  std::string gpu;
  std::vector<WeightFacts> weights;
  std::vector<StateFacts> states;
  std::vector<MethodFacts> methods;
  std::vector<PlanTable> plan_tables;
};

// Reads a flat record, as src/penstock/executorch/description.py has it. Throws LoadError(package), also if parts of it
// do not fit together. The record lists the plans, but does not locate them.
Description read_description(const void* record, size_t bytes);

// Reads the next part of a record, for a program of so many methods and weights. Throws LoadError(package) and what the
// reader throws.
std::vector<PlanTable> read_plan_tables(penstock::RecordReader& in, size_t methods, size_t weights);

}  // namespace penstock_executorch
