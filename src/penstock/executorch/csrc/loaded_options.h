// What a caller sets and gets with ExecuTorch's set_option and get_option on a loaded program.
#pragma once

#include <executorch/runtime/backend/interface.h>

#include <string>
#include <vector>

namespace penstock_executorch {

// Sets a budget for the sessions of one group. Throws LoadError(option), LoadError(budget), LoadError(below_floor) or
// LoadError(busy), and then has changed nothing. Returns what to say about it, one line each.
std::vector<std::string> set_loaded_options(const executorch::runtime::Span<executorch::runtime::BackendOption>& options);

// Fills in what was counted, as decimal numbers. Throws LoadError(option).
void get_loaded_options(executorch::runtime::Span<executorch::runtime::BackendOption>& options);

}  // namespace penstock_executorch
