// What kernels do to experts, by the CPU: for the soft driver, and to tell hit rates from a log.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/expert_table.h"

namespace penstock {

// An index beyond the last expert throws CoreError.
void choose_experts(const ChooseCall& call);
void move_experts(const MoveCall& call);

// Of what a table has logged: how many would have been hits with so many slots, how many were asked for, and in how many
// calls. The first quarter warms up, and does not count.
struct HitRate {
  int64_t hits;
  int64_t uses;
  int64_t calls;
};
HitRate logged_hits(const unsigned char* table, int experts, int slots, int wanted_slots);

}  // namespace penstock
