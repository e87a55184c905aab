// Which budget applies: the value given at load, then the one baked in at export, then an automatic one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "payload.h"
#include "penstock_core.h"

namespace penstock_executorch {

constexpr const char* kBudgetOption = "weight_offload_budget";

// The amount that an option's text stands for, as Python reads one; throws LoadError(budget) with Python's sentence
// after the option's name.
int64_t parse_bytes(const std::string& text, const std::string& option);

// As options gave it: a number of bytes, automatic (whatever was baked in), or nothing.
struct BudgetRequest {
  std::optional<int64_t> bytes;
  bool automatic = false;

  bool is_given() const { return bytes || automatic; }
};

// What decides about the budgets of a loaded program.
struct BudgetTerms {
  int64_t floor_bytes;
  int64_t full_bytes;
  // None: there is no bound. Graphs keep the memory they compute in, and runs that are no replays need as much again.
  std::optional<int64_t> activation_bytes;
  // Asked how much device memory is free.
  void* driver;
  bool on_gpu;
  bool cuda_graph;
};

// The core chooses, as for every kind of program. `origin` says where a given number comes from; `baked_bytes` may be
// PENSTOCK_NONE; `held_bytes`: what weights of the program hold already. Throws LoadError(budget) or
// LoadError(below_floor), which names the exact minimum.
PenstockBudget choose_budget(const BudgetRequest& request, const BudgetTerms& terms, int32_t origin, int64_t baked_bytes,
                             int64_t held_bytes);

// The largest plan that the budget allows.
size_t choose_plan(const std::vector<ReadyPlan>& plans, int64_t floor_bytes, int64_t budget_bytes);

}  // namespace penstock_executorch
