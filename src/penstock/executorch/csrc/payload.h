// What a lowered program carries: a ticket per delegate, and one payload that all of them share.
// src/penstock/executorch/payload.py writes both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace penstock_executorch {

struct Ticket {
  std::string payload;
  std::string method;
  int64_t number;
};

struct WeightFacts {
  std::string name;
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

struct MethodFacts {
  std::string name;
  std::vector<InputFacts> inputs;
  int64_t outputs;
};

// A plan, made at export; it fits every budget of `device_bytes` or more.
struct Rung {
  int64_t device_bytes;
  // Not aligned: a part of the payload.
  const char* numbers;
  size_t count;
};

struct Payload {
  std::string program;
  std::string device;
  int64_t page_bytes;
  int64_t floor_bytes;
  int64_t full_bytes;
  std::optional<int64_t> baked_bytes;
  std::optional<int64_t> activation_bytes;
  std::string torch;
  std::string machine;
  std::string cpu;
  std::vector<WeightFacts> weights;
  std::vector<MethodFacts> methods;
  // Smallest first.
  std::vector<Rung> rungs;
  const char* code;
  size_t code_bytes;
};

// Both throw Refusal(package). A payload points into the bytes it was read from.
Ticket read_ticket(const void* data, size_t bytes);
Payload read_payload(const void* data, size_t bytes);

// The numbers of a rung with the offsets that weights have in a file; throws Refusal(package).
std::vector<int64_t> rebased(const Rung& rung, const std::vector<int64_t>& weight_offsets,
                             const std::vector<WeightFacts>& weights);

}  // namespace penstock_executorch
