#include "budget.h"

#include <algorithm>

#include "core.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

constexpr int64_t kLeastReserveBytes = int64_t{256} << 20;

// Amounts that are not negative, some of them from a file; no sum of them overflows.
int64_t sum_of(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

int64_t automatic_bytes(const Payload& payload, const PlanTable& table, void* driver) {
  if (!payload.activation_bytes)
    throw LoadError(Kind::budget,
                  "there is no automatic budget: a dynamic size of the program has no highest value, so the memory it "
                  "needs beside the weights has no bound; give a budget, or export with a highest value for every "
                  "dynamic size");
  int64_t free_bytes = 0, total_bytes = 0;
  if (core().driver_memory(driver, &free_bytes, &total_bytes)) throw_core_failure();
  int64_t reserve_bytes = std::max(kLeastReserveBytes, total_bytes / (payload.device == "cuda" ? 50 : 20));
  int64_t other_bytes = sum_of(*payload.activation_bytes, reserve_bytes);
  // Never negative: a device that lacks memory for the rest has none for weights.
  int64_t budget_bytes = std::max(int64_t{0}, free_bytes - other_bytes);
  int64_t lacking_bytes = sum_of(table.floor_bytes, other_bytes) - free_bytes;
  if (lacking_bytes > 0)
    throw LoadError(Kind::below_floor,
                  "the automatic budget is " + format_bytes(budget_bytes) + " (free " + format_bytes(free_bytes) +
                      " - activations " + format_bytes(*payload.activation_bytes) + " - reserve " +
                      format_bytes(reserve_bytes) + "), below the floor of this program: it needs at least " +
                      std::to_string(table.floor_bytes) + " bytes for weights, so " + format_bytes(lacking_bytes) +
                      " more must be free; free device memory, or give a budget to leave less in reserve",
                  table.floor_bytes);
  return budget_bytes;
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

Budget choose_budget(const BudgetRequest& request, const Payload& payload, const PlanTable& table, void* driver) {
  if (request.automatic || (!request.bytes && !payload.baked_bytes))
    return {automatic_bytes(payload, table, driver), BudgetSource::automatic};
  Budget budget = request.bytes ? Budget{*request.bytes, BudgetSource::load}
                                : Budget{*payload.baked_bytes, BudgetSource::baked};
  require_floor(budget.asked_bytes, table.floor_bytes, request.bytes ? "given at load" : "baked at export");
  return budget;
}

void require_floor(int64_t budget_bytes, int64_t floor_bytes, const std::string& origin) {
  if (budget_bytes >= floor_bytes) return;
  throw LoadError(Kind::below_floor,
                  "the budget of " + format_bytes(budget_bytes) + " (" + origin +
                      ") is below the floor of this program: it needs at least " + std::to_string(floor_bytes) +
                      " bytes; give weight_offload_budget=" + std::to_string(floor_bytes) +
                      " or weight_offload_budget_mb=" + std::to_string((floor_bytes + (1 << 20) - 1) >> 20) +
                      ", or more",
                  floor_bytes);
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
