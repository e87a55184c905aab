// The linear of a machine without a GPU: slow, in one fixed order of sums, so that the bits of a result do not depend
// on where the rows of the weight lie.
#pragma once

#include "linear/linear_recipe.h"

namespace penstock {

// On the calling thread. Addresses are those of the process.
void reference_linear(const LinearCase& which, const LinearCall& call);

}  // namespace penstock
