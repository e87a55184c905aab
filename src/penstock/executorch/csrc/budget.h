// Which budget holds: the value given at load, then the one baked in at export, then an automatic one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "payload.h"

namespace penstock_executorch {

enum class BudgetSource : int64_t { load = 0, baked = 1, automatic = 2 };

constexpr const char* kBudgetOption = "weight_offload_budget";

struct Budget {
  int64_t asked_bytes;
  BudgetSource source;
};

// A decimal number of bytes, without sign, unit or blanks; throws LoadError(budget).
// `what` is the option's name, for the message.
int64_t parse_decimal(const std::string& text, const std::string& what = kBudgetOption);

// As options gave it: a number of bytes, "automatic" whatever was baked in, or nothing.
struct BudgetRequest {
  std::optional<int64_t> bytes;
  bool automatic = false;

  bool is_given() const { return bytes || automatic; }
};

// `driver` tells how much is free. Throws LoadError(budget) or LoadError(below_floor), which names the exact minimum.
Budget choose_budget(const BudgetRequest& request, const Payload& payload, const PlanTable& table, void* driver);

// LoadError(below_floor), which names the exact minimum; `origin` is where the budget comes from, for the message.
void require_floor(int64_t budget_bytes, int64_t floor_bytes, const std::string& origin);

// The largest plan that the budget allows.
size_t choose_plan(const std::vector<ReadyPlan>& plans, int64_t floor_bytes, int64_t budget_bytes);

}  // namespace penstock_executorch
