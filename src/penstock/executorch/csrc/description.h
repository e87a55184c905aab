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
  // All of a tied one; the first is `name`.
  std::vector<std::string> names;
  int64_t scalar_type;
  std::vector<int64_t> shape;
  std::vector<int64_t> dim_order;
  int64_t bytes;
};

// Of ExecuTorch's scalar types, the first so many are whole numbers.
constexpr int64_t kWholeNumberTypes = 5;

// A slice of one dimension, as Python has it.
struct IndexSlice {
  int64_t begin;
  int64_t end;
  int64_t step;
};

// Numbers of an input that index a table or a cache: each is at least `low` and below `high`.
struct IndexFacts {
  int64_t low;
  int64_t high;
  std::string table;
  int64_t dim;
  int64_t size;
  // Which numbers of the input, by dimension; all of them where it is empty.
  std::vector<IndexSlice> region;
};

struct InputFacts {
  std::string name;
  int64_t scalar_type;
  std::vector<int64_t> shape;  // -1: dynamic
  std::vector<int64_t> dim_order;
  std::vector<IndexFacts> indexes;
};

// A mutated buffer, which belongs to the delegates of all methods together.
struct StateFacts {
  std::string name;
  int64_t scalar_type;
  std::vector<int64_t> shape;
  std::vector<int64_t> dim_order;
  int64_t bytes;
  // Whether the weights file must hold what it starts with; else it starts as zeros, unless the file says otherwise.
  bool is_stored;
};

struct MethodFacts {
  std::string name;
  // Of Description::states: what the code takes before its inputs, and writes.
  std::vector<int64_t> states;
  std::vector<InputFacts> inputs;
  int64_t outputs;
  // Of inputs and outputs together, at most: TransferMemory holds them.
  int64_t transfer_bytes;
};

// What packed weights pass through on their way over the link: a range beyond those of a plan, divided evenly.
struct Slots {
  int64_t count = 0;
  int64_t bytes = 0;
  // Of all of them, in whole pages.
  int64_t total_bytes = 0;
};

// A plan, made at export; it fits every budget of `device_bytes` or more.
struct StoredPlan {
  // With the slots.
  int64_t device_bytes;
  // Whether something is copied in every run.
  bool is_copying;
  size_t count;
  uint64_t seal;
  // Not aligned: a part of the payload.
  const char* numbers = nullptr;
  // None, where weights are as they are; the plan in the file has none.
  Slots slots{};
};

// The plans of some of the program's delegates over one ring.
struct PlanTable {
  // Numbers of Description::methods, in the order in which a session counts them.
  std::vector<int64_t> methods;
  // Numbers of Description::weights that some plan reads where they lie in host memory, which staging has not.
  std::vector<int64_t> in_place;
  int64_t floor_bytes;
  int64_t full_bytes;
  // With less, weights are read over the link instead of copied. 0: that is no question of the budget.
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
  // Of programs for a GPU: "9.0", and its name.
  std::string capability;
  std::string gpu;
  std::vector<WeightFacts> weights;
  std::vector<StateFacts> states;
  std::vector<MethodFacts> methods;
  std::vector<PlanTable> plan_tables;
};

// A flat record, as src/penstock/executorch/description.py has it. Throws LoadError(package), also where parts of it do
// not go together. The plans are told of, not found.
Description read_description(const void* record, size_t bytes);

// The next of a record, for a program of so many methods and weights. Throws LoadError(package) and what the reader throws.
std::vector<PlanTable> read_plan_tables(penstock::RecordReader& in, size_t methods, size_t weights);

}  // namespace penstock_executorch
