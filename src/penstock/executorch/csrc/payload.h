// What a lowered program carries: a delegate_ref per delegate, and one payload that all of them share.
// src/penstock/executorch/payload.py writes both, and refuses in the same words.
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

// A plan as the core takes it, which goes by the numbers of weights; on its own, whatever becomes of the payload.
struct ReadyPlan {
  int64_t device_bytes;
  std::vector<int64_t> numbers;
  Slots slots{};
};

// The weights that are packed in the file: none, or as the core takes them.
struct PackedWeights {
  std::vector<int64_t> numbers;
  // Numbers of Description::weights.
  std::set<int64_t> weights;
  int64_t largest_block_bytes = 0;
  // Plans for them, where the file has some for this program; and the memory that these point into.
  std::vector<PlanTable> plan_tables;
  std::shared_ptr<const void> plans_memory;
};

struct Payload : Description {
  // The name of the file that it was read from, where that is mapped; else the program's own.
  std::string shown;
  const char* description;
  size_t description_bytes;
  const char* code;
  size_t code_bytes;
};

// Both throw LoadError(package). A payload points into the bytes it was read from.
DelegateRef read_delegate_ref(const void* data, size_t bytes);
Payload read_payload(const void* data, size_t bytes);

// The key of plans for packed weights in the weights file: that of this program.
std::string packed_plans_key(const Payload& payload);
// What stands there: src/penstock/executorch/packed_plans.py writes it. The tables point into the bytes. Throws
// LoadError(weights_file) where it is damaged, or for other packed weights than these.
std::vector<PlanTable> read_packed_plans(const void* data, size_t bytes, const Payload& payload,
                                         const PackedWeights& packed);

// The plans for these delegates; `staged`: only those that read nothing in place will do. With packed weights, those that
// were made for them; where there are none, those of the program that read none of them in place, with slots. Throws
// LoadError(package).
PlanTable find_plan_table(const Payload& payload, const std::vector<int64_t>& methods, bool staged,
                          const PackedWeights& packed);

ReadyPlan ready(const StoredPlan& plan);

}  // namespace penstock_executorch
