// What a caller of ExecuTorch's set_option and get_option says of a program that is loaded.
#pragma once

#include <executorch/runtime/backend/interface.h>

#include <string>
#include <vector>

namespace penstock_executorch {

// A budget, of the sessions of one group. Throws LoadError(option), LoadError(budget), LoadError(below_floor) or
// LoadError(busy); nothing has changed then. Returns what there is to say of it, a line each.
std::vector<std::string> set_loaded_options(const executorch::runtime::Span<executorch::runtime::BackendOption>& options);

// Fills in what was counted, as decimal numbers. Throws LoadError(option).
void get_loaded_options(executorch::runtime::Span<executorch::runtime::BackendOption>& options);

}  // namespace penstock_executorch
