// What kernels do with experts, on the CPU: for the soft driver, and to compute hit rates from a log.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/expert_table.h"

namespace penstock {

// An index beyond the last expert throws CoreError.
void choose_experts(const ChooseCall& call);
void move_experts(const MoveCall& call);

// From a table's log: how many uses would have been hits with `wanted_slots` slots, how many uses there were, and in
// how many calls. The first quarter is warm-up and does not count.
struct HitRate {
  int64_t hits;
  int64_t uses;
  int64_t calls;
};
HitRate logged_hits(const unsigned char* table, int experts, int slots, int wanted_slots);

}  // namespace penstock
