// Which budget holds. At load: the value given, or what a total leaves, then the one baked at export, then an automatic
// one. Later: what is given then. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "penstock_core.h"

namespace penstock {

// Where the budget comes from that will hold: for PENSTOCK_BUDGET_AUTOMATIC its terms are needed.
int64_t budget_origin(int64_t given_bytes, int64_t origin, int64_t baked_bytes);

// For people.
const char* origin_text(int64_t origin);

// Where less is taken than was asked for; else empty.
std::string clamp_sentence(const PenstockBudget& budget);

// What is left alone: 2% of a GPU's memory, 5% of main memory, and never less than 256 MiB.
int64_t reserve_bytes(int64_t total_bytes, bool on_gpu);

// Fills in budget_bytes, asked_bytes and origin. Throws CoreError(below_floor) when the floor is not reached; asked_bytes
// is then what there is.
void choose_budget(PenstockBudget& budget);

}  // namespace penstock
