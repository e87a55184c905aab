// ExecuTorch's number of a refusal: what the backend answers, and what the functions of penstock_executorch.h return.
#pragma once

#include <executorch/runtime/core/error.h>

#include "load_error.h"

namespace penstock_executorch {

executorch::runtime::Error code_of(const LastRefusal& refusal);

}  // namespace penstock_executorch
