// Whether a program can run here. Pure.
#pragma once

#include "penstock_core.h"

namespace penstock {

// Torch's minor version, the machine and the compute capability must be the same, and the CPU must be able to run the
// code. Throws CoreError(build).
void check_build(const PenstockBuild& built, const PenstockBuild& here);

}  // namespace penstock
