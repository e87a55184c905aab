// The options that a caller of ExecuTorch's Module gives at load.
#pragma once

#include <executorch/runtime/backend/interface.h>

#include "program_session.h"

namespace penstock_executorch {

constexpr const char* kBackendName = "PenstockBackend";

constexpr const char* kBudgetMbOption = "weight_offload_budget_mb";

// Null if the value is no string.
const std::string* as_text(const executorch::runtime::BackendOption& option, std::string& storage);

// Reads an option that is a budget, in MiB or in bytes; throws LoadError(budget).
BudgetRequest read_budget(const executorch::runtime::BackendOption& option, const std::string& key);

// Throws LoadError(option) or LoadError(budget), also for an unknown option.
SessionRequest read_options(const executorch::runtime::BackendInitContext& context);

}  // namespace penstock_executorch
