// The launch of a prepared linear: two calls of the driver.
#pragma once

#include "cuda_library.h"
#include "linear_recipe.h"

namespace penstock {

// The call that failed, by its name, and what it said; code 0 if none did.
struct CudaOutcome {
  int code;
  const char* call;
};

CudaOutcome launch_linear(const CudaLibrary& cuda, const LinearRecipe& recipe, const LinearCall& call,
                          DeviceStream stream);

}  // namespace penstock
