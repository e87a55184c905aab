// Whether a program can run here. Pure.
#pragma once

#include "penstock_core.h"

namespace penstock {

// Torch must be of the same minor version, machine and compute capability the same, and the CPU able to run the code.
// Throws CoreError(build).
void check_build(const PenstockBuild& built, const PenstockBuild& here);

}  // namespace penstock
