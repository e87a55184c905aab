// Numbers with which a program indexes its tables and caches, checked before anything of it runs.
#pragma once

#include "code.h"
#include "description.h"

namespace penstock_executorch {

// The memory of the view is the host's. Throws LoadError(input), in the words of runtime/index_check.py.
void check_indices(const InputFacts& facts, const TensorView& view);

}  // namespace penstock_executorch
