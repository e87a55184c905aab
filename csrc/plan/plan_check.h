// Checks what a plan's records show by themselves, before any of it is installed. Only the schedule says which steps
// read an access, so waits are proved where plans are made, in src/penstock/plan/check.py.
#pragma once

#include "plan/plan_records.h"

namespace penstock {

// Throws CoreError(usage) unless, in the order of the host's calls, every access of a cold run and of a warm one finds
// its weight, byte for byte, filled or put there by the copies of its stay. `page_bytes`: what the driver maps.
void check_plan(const PlanRecord& plan, int64_t page_bytes);

}  // namespace penstock
