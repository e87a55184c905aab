// The linear for a machine without a GPU. It is slow and sums in one fixed order, so the bits of a result do not depend
// on where the rows of the weight lie.
#pragma once

#include "linear/linear_recipe.h"

namespace penstock {

// Runs on the calling thread. Addresses are those of the process.
void reference_linear(const LinearCase& which, const LinearCall& call);

}  // namespace penstock
