// What a caller of ExecuTorch's Module says at load.
#pragma once

#include <executorch/runtime/backend/interface.h>

#include "program_session.h"

namespace penstock_executorch {

constexpr const char* kBackendName = "PenstockBackend";

// Throws LoadError(option) or LoadError(budget), also for an option that there is not.
SessionRequest read_options(const executorch::runtime::BackendInitContext& context);

}  // namespace penstock_executorch
