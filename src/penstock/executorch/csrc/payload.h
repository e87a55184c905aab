// What a lowered program carries: a delegate_ref per delegate, and one payload that all of them share.
// src/penstock/executorch/payload.py writes both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace penstock_executorch {

struct DelegateRef {
  std::string payload;
  std::string method;
  int64_t number;
};

struct WeightFacts {
  std::string name;
  // All of a tied one; the first is `name`.
  std::vector<std::string> names;
  int64_t scalar_type;
  std::vector<int64_t> shape;
  std::vector<int64_t> dim_order;
  int64_t bytes;
};

struct InputFacts {
  int64_t scalar_type;
  std::vector<int64_t> shape;  // -1: dynamic
  std::vector<int64_t> dim_order;
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
  // Of Payload::states: what the code takes before its inputs, and writes.
  std::vector<int64_t> states;
  std::vector<InputFacts> inputs;
  int64_t outputs;
};

// What packed weights pass through on their way over the link: a range of a plan, divided evenly.
struct Slots {
  int64_t count;
  int64_t bytes;
  // Of all of them, in whole pages.
  int64_t total_bytes;
};

// A plan, made at export; it fits every budget of `device_bytes` or more.
struct StoredPlan {
  // With the slots.
  int64_t device_bytes;
  // Not aligned: a part of the payload.
  const char* numbers;
  size_t count;
  // None, where weights are as they are; the plan in the file has none.
  Slots slots{0, 0, 0};
};

// The same for one weights file, as the core takes it; on its own, whatever becomes of the payload.
struct ReadyPlan {
  int64_t device_bytes;
  std::vector<int64_t> numbers;
};

// The weights that are packed in the file: none, or as the core takes them.
struct PackedWeights {
  std::vector<int64_t> numbers;
  // Numbers of Payload::weights.
  std::set<size_t> weights;
  int64_t largest_block_bytes = 0;
};

// The plans of some of the program's delegates over one ring.
struct PlanTable {
  // Numbers of Payload::methods, in the order in which a session counts them.
  std::vector<int64_t> methods;
  // Whether some access reads its weight where it lies in host memory, which staging has not.
  bool reads_in_place;
  int64_t floor_bytes;
  int64_t full_bytes;
  // Smallest first.
  std::vector<StoredPlan> plans;
};

struct Payload {
  std::string program;
  std::string device;
  int64_t page_bytes;
  std::optional<int64_t> baked_bytes;
  std::optional<int64_t> activation_bytes;
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
  const char* description;
  size_t description_bytes;
  const char* code;
  size_t code_bytes;
};

// Both throw LoadError(package). A payload points into the bytes it was read from.
DelegateRef read_delegate_ref(const void* data, size_t bytes);
Payload read_payload(const void* data, size_t bytes);

// The plans for these delegates; `staged`: only those that read nothing in place will do. With packed weights, those that
// read none of them in place, with slots. Throws LoadError(package).
PlanTable find_plan_table(const Payload& payload, const std::vector<int64_t>& methods, bool staged,
                   const PackedWeights& packed);

// The numbers of a plan with the offsets that weights have in a file, and its slots; throws LoadError(package).
std::vector<int64_t> rebased(const StoredPlan& plan, const std::vector<int64_t>& weight_offsets,
                             const std::vector<WeightFacts>& weights);

}  // namespace penstock_executorch
