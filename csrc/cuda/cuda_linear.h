// The launch of a prepared linear: two calls of the driver.
#pragma once

#include "cuda/cuda_library.h"
#include "cuda/cuda_outcome.h"
#include "linear/linear_recipe.h"

namespace penstock {

CudaOutcome launch_linear(const CudaLibrary& cuda, const LinearRecipe& recipe, const LinearCall& call,
                          DeviceStream stream);

}  // namespace penstock
