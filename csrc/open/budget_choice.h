// Which budget applies. At load: the value given, or what a total leaves; else the one baked at export; else an
// automatic one. Later: the value given then. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "penstock_core.h"

namespace penstock {

// Where the budget that will apply comes from. PENSTOCK_BUDGET_AUTOMATIC needs the terms of the automatic budget.
int64_t budget_origin(int64_t given_bytes, int64_t origin, int64_t baked_bytes);

// For messages.
const char* origin_text(int64_t origin);

// Says if less is used than was asked for; else empty.
std::string clamp_sentence(const PenstockBudget& budget);

// What stays free: 2% of a GPU's memory, 5% of main memory, and never less than 256 MiB.
int64_t reserve_bytes(int64_t total_bytes, bool on_gpu);

// Fills in budget_bytes, asked_bytes and origin. Throws CoreError(below_floor) if the budget does not reach the floor;
// asked_bytes then says what there is.
void choose_budget(PenstockBudget& budget);

}  // namespace penstock
