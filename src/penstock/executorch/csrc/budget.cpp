// Asks the core for a budget, and finds the plan that goes with it.
#include "budget.h"

#include "code.h"
#include "core.h"
#include "load_error.h"

namespace penstock_executorch {

int64_t parse_bytes(const std::string& text, const std::string& option) {
  int64_t bytes = 0;
  if (core().parse_bytes(text.c_str(), &bytes)) throw LoadError(Kind::budget, option + ": " + core().failure_text());
  return bytes;
}

PenstockBudget choose_budget(const BudgetRequest& request, const BudgetTerms& terms, int32_t origin, int64_t baked_bytes,
                             int64_t held_bytes) {
  PenstockBudget budget{};
  budget.floor_bytes = terms.floor_bytes;
  budget.full_bytes = terms.full_bytes;
  budget.given_bytes = request.automatic ? int64_t{PENSTOCK_AUTOMATIC} : request.bytes.value_or(PENSTOCK_NONE);
  budget.origin = origin;
  budget.baked_bytes = baked_bytes;
  if (core().budget_origin(budget.given_bytes, budget.origin, baked_bytes) == PENSTOCK_BUDGET_AUTOMATIC) {
    if (!terms.activation_bytes)
      throw LoadError(Kind::budget,
                      "there is no automatic budget: a dynamic size of the program has no highest value, so the memory "
                      "it needs beside the weights has no bound; give a budget, or export with a highest value for every "
                      "dynamic size");
    int64_t total_bytes = 0;
    // What torch cannot give back is not free, so let it give back the rest before asking the driver.
    if (terms.on_gpu) give_back_cached_memory();
    if (core().driver_memory(terms.driver, &budget.free_bytes, &total_bytes)) throw_core_failure();
    budget.held_bytes = held_bytes;
    budget.activation_bytes = *terms.activation_bytes * (terms.cuda_graph ? 2 : 1);  // state is no longer free memory
    budget.reserve_bytes = core().reserve_bytes(total_bytes, terms.on_gpu);
  }
  if (!core().choose_budget(&budget)) return budget;
  if (core().failure() == (int32_t)Failure::below_floor)
    throw LoadError(Kind::below_floor, core().failure_text(), budget.floor_bytes);
  throw_core_failure();
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
