#include "budget.h"

#include <algorithm>

#include "code.h"
#include "core.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

PenstockBudget chosen(PenstockBudget budget) {
  constexpr int32_t kBelowFloor = 12;  // as the core counts its failures
  if (!core().choose_budget(&budget)) return budget;
  if (core().failure() == kBelowFloor) throw LoadError(Kind::below_floor, core().failure_text(), budget.floor_bytes);
  throw_core_failure();
}

}  // namespace

int64_t parse_decimal(const std::string& text, const std::string& what) {
  int64_t value = 0;
  bool fits = !text.empty();
  for (char c : text) {
    if (c < '0' || c > '9') fits = false;
    if (!fits || __builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, c - '0', &value)) {
      fits = false;
      break;
    }
  }
  if (!fits)
    throw LoadError(Kind::budget, what + " is '" + text +
                                    "', which is no number of bytes; valid: a decimal number of at most "
                                    "9223372036854775807, as in '8589934592'" +
                                    (what.rfind(kBudgetOption, 0) == 0 ? ", or 'auto'" : ""));
  return value;
}

PenstockBudget choose_budget(const BudgetRequest& request, const Payload& payload, const PlanTable& table, void* driver,
                             bool cuda_graph) {
  PenstockBudget asked{};
  asked.floor_bytes = table.floor_bytes;
  asked.full_bytes = table.full_bytes;
  asked.given_bytes = request.automatic ? int64_t{PENSTOCK_AUTOMATIC} : request.bytes.value_or(PENSTOCK_NONE);
  asked.origin = PENSTOCK_BUDGET_LOAD;
  asked.baked_bytes = payload.baked_bytes.value_or(PENSTOCK_NONE);
  if (core().budget_origin(asked.given_bytes, asked.origin, asked.baked_bytes) == PENSTOCK_BUDGET_AUTOMATIC) {
    if (!payload.activation_bytes)
      throw LoadError(Kind::budget,
                      "there is no automatic budget: a dynamic size of the program has no highest value, so the memory "
                      "it needs beside the weights has no bound; give a budget, or export with a highest value for every "
                      "dynamic size");
    int64_t total_bytes = 0;
    // What torch cannot give back is not free. Hence this comes before the driver is asked.
    if (payload.device == "cuda") give_back_cached_memory();
    if (core().driver_memory(driver, &asked.free_bytes, &total_bytes)) throw_core_failure();
    asked.activation_bytes = *payload.activation_bytes * (cuda_graph ? 2 : 1);  // state is there already, and no longer free
    asked.reserve_bytes = core().reserve_bytes(total_bytes, payload.device == "cuda");
  }
  return chosen(asked);
}

PenstockBudget choose_new_budget(int64_t bytes, int64_t floor_bytes, int64_t full_bytes) {
  PenstockBudget asked{};
  asked.floor_bytes = floor_bytes;
  asked.full_bytes = full_bytes;
  asked.given_bytes = bytes;
  asked.origin = PENSTOCK_BUDGET_CHANGE;
  asked.baked_bytes = PENSTOCK_NONE;
  return chosen(asked);
}

size_t choose_plan(const std::vector<ReadyPlan>& plans, int64_t floor_bytes, int64_t budget_bytes) {
  size_t chosen = plans.size();
  for (size_t i = 0; i < plans.size(); ++i)
    if (plans[i].device_bytes <= budget_bytes) chosen = i;
  if (chosen == plans.size())
    throw LoadError(Kind::package, "the program has no plan for its own floor of " + std::to_string(floor_bytes) +
                                     " bytes: its smallest holds " + std::to_string(plans.front().device_bytes));
  return chosen;
}

}  // namespace penstock_executorch
