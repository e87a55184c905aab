// What a lowered program carries: a delegate_ref per delegate, and one payload that all of them share.
// src/penstock/executorch/payload.py writes both, and refuses with the same messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "description.h"

namespace penstock_executorch {

struct DelegateRef {
  std::string payload;
  std::string method;
  int64_t number;
};

// A plan as the core takes it, with weights by number. It owns its memory, so the payload may go.
struct ReadyPlan {
  int64_t device_bytes;
  std::vector<int64_t> numbers;
  Slots slots{};
};

// The weights that are packed in the file, as the core takes them; empty if there are none.
struct PackedWeights {
  std::vector<int64_t> numbers;
  // Numbers of Description::weights.
  std::set<int64_t> weights;
  int64_t largest_block_bytes = 0;
  // Plans for them, if the file has some for this program; and the memory that these point into.
  std::vector<PlanTable> plan_tables;
  std::shared_ptr<const void> plans_memory;
};

struct Payload : Description {
  // The name of the file that it was read from, if that is mapped; else the program's own.
  std::string shown;
  const char* description;
  size_t description_bytes;
  const char* code;
  size_t code_bytes;
};

// Both throw LoadError(package). A payload points into the bytes it was read from.
DelegateRef read_delegate_ref(const void* data, size_t bytes);
Payload read_payload(const void* data, size_t bytes);

// The key under which the weights file has this program's plans for packed weights.
std::string packed_plans_key(const Payload& payload);
// Reads what is there: src/penstock/executorch/packed_plans.py writes it. The tables point into the bytes. Throws
// LoadError(weights_file) if it is damaged, or for other packed weights than these.
std::vector<PlanTable> read_packed_plans(const void* data, size_t bytes, const Payload& payload,
                                         const PackedWeights& packed);

// The plans for these delegates. `staged`: only plans that read nothing in place will do. With packed weights, the
// plans that were made for them; if there are none, the program's plans that read none of them in place, with slots.
// Throws LoadError(package).
PlanTable find_plan_table(const Payload& payload, const std::vector<int64_t>& methods, bool staged,
                          const PackedWeights& packed);

ReadyPlan ready(const StoredPlan& plan);

}  // namespace penstock_executorch
