// Checks the values with which a program indexes its tables and caches, before anything of it runs.
#pragma once

#include "code.h"
#include "description.h"

namespace penstock_executorch {

// The view must be of host memory. Throws LoadError(input), with the messages of runtime/index_check.py.
void check_indices(const InputFacts& facts, const TensorView& view);

}  // namespace penstock_executorch
