// Chooses a budget, compares it with the floor, and words the messages.
#include "open/budget_choice.h"

#include <algorithm>

#include "driver/driver.h"
#include "open/amounts.h"
#include "open/byte_text.h"

namespace penstock {
namespace {

constexpr int64_t kLeastReserveBytes = int64_t{256} << 20, kMib = int64_t{1} << 20;

int64_t automatic_bytes(PenstockBudget& budget) {
  const int64_t other_bytes = sum_of(sum_of(budget.activation_bytes, budget.state_bytes), budget.reserve_bytes);
  const int64_t room_bytes = sum_of(budget.free_bytes, budget.held_bytes);
  // Never negative: a device that lacks memory for the rest has none for weights.
  const int64_t found_bytes = budget.asked_bytes = std::max<int64_t>(0, room_bytes - other_bytes);
  const int64_t lacking_bytes = sum_of(budget.floor_bytes, other_bytes) - room_bytes;
  if (lacking_bytes <= 0) return found_bytes;
  const std::string held = budget.held_bytes ? " + held for weights " + format_bytes(budget.held_bytes) : "";
  throw CoreError(Failure::below_floor,
                  "the automatic budget is " + format_bytes(found_bytes) + " (free " + format_bytes(budget.free_bytes) +
                      held + " - activations " + format_bytes(budget.activation_bytes) + " - state " +
                      format_bytes(budget.state_bytes) + " - reserve " + format_bytes(budget.reserve_bytes) +
                      "), below the floor of this program: it needs at least " + std::to_string(budget.floor_bytes) +
                      " bytes for weights, so " + format_bytes(lacking_bytes) +
                      " more must be free; free device memory, or give a budget to leave less in reserve");
}

}  // namespace

const char* origin_text(int64_t origin) {
  switch (origin) {
    case PENSTOCK_BUDGET_LOAD:
      return "given at load";
    case PENSTOCK_BUDGET_TOTAL:
      return "what device_memory leaves";
    case PENSTOCK_BUDGET_CHANGE:
      return "given to set_budget";
    case PENSTOCK_BUDGET_BAKED:
      return "baked at export";
    default:
      return "automatic";
  }
}

std::string clamp_sentence(const PenstockBudget& budget) {
  if (budget.budget_bytes >= budget.asked_bytes) return "";
  return "the budget of " + format_bytes(budget.asked_bytes) + " (" + origin_text(budget.origin) +
         ") is more than all weights take: " + format_bytes(budget.budget_bytes) + " of it are used";
}

int64_t budget_origin(int64_t given_bytes, int64_t origin, int64_t baked_bytes) {
  if (given_bytes >= 0) return origin;
  return given_bytes == PENSTOCK_NONE && baked_bytes >= 0 ? PENSTOCK_BUDGET_BAKED : PENSTOCK_BUDGET_AUTOMATIC;
}

// On a GPU the reserve is for what appears after the load: libraries' workspaces, kernels loaded at their first launch,
// the allocator's rounding. Main memory is shared with every other process, so more of it stays free.
int64_t reserve_bytes(int64_t total_bytes, bool on_gpu) {
  return std::max(kLeastReserveBytes, total_bytes / (on_gpu ? 50 : 20));
}

void choose_budget(PenstockBudget& budget) {
  budget.origin = budget_origin(budget.given_bytes, budget.origin, budget.baked_bytes);
  if (budget.origin == PENSTOCK_BUDGET_AUTOMATIC)
    budget.asked_bytes = automatic_bytes(budget);
  else
    budget.asked_bytes = budget.origin == PENSTOCK_BUDGET_BAKED ? budget.baked_bytes : budget.given_bytes;
  if (budget.asked_bytes < budget.floor_bytes) {
    const std::string floor = std::to_string(budget.floor_bytes);
    const std::string mebibytes = std::to_string((budget.floor_bytes + kMib - 1) / kMib);
    throw CoreError(Failure::below_floor,
                    "the budget of " + format_bytes(budget.asked_bytes) + " (" + origin_text(budget.origin) +
                        ") is below the floor of this program: it needs at least " + floor + " bytes; give " + floor +
                        (budget.origin == PENSTOCK_BUDGET_CHANGE ? "" : ", or weight_offload_budget_mb=" + mebibytes) +
                        ", or more");
  }
  // Pages are whole, so the floor of a small program may exceed the bytes of its weights.
  budget.budget_bytes = std::min(budget.asked_bytes, std::max(budget.full_bytes, budget.floor_bytes));
}

}  // namespace penstock
