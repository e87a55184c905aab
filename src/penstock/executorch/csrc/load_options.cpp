// Reads the options of a load, and refuses unknown ones.
#include "load_options.h"

#include <cstring>

#include "load_error.h"

namespace penstock_executorch {
namespace {

using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendOption;

// The delegate's name follows.
constexpr const char* kOwnBudget = "weight_offload_budget:";

}  // namespace

const std::string* as_text(const BackendOption& option, std::string& storage) {
  auto* found = std::get_if<std::array<char, executorch::runtime::kMaxOptionValueLength>>(&option.value);
  if (!found) return nullptr;
  storage = std::string(found->data(), strnlen(found->data(), found->size()));
  // Longer values were silently cut on their way here.
  if (storage.size() + 1 >= found->size())
    throw LoadError(Kind::option, std::string("option ") + option.key + " has a value of 255 characters or more");
  return &storage;
}

BudgetRequest read_budget(const BackendOption& option, const std::string& key) {
  BudgetRequest budget;
  if (key == kBudgetMbOption) {
    const int* mb = std::get_if<int>(&option.value);
    if (!mb) throw LoadError(Kind::budget, "weight_offload_budget_mb is no int; valid: an int of 0 or more (MiB)");
    if (*mb < 0)
      throw LoadError(Kind::budget,
                      "weight_offload_budget_mb is " + std::to_string(*mb) + "; valid: an int of 0 or more (MiB)");
    budget.bytes = (int64_t)*mb << 20;
    return budget;
  }
  std::string text;
  if (!as_text(option, text))
    throw LoadError(Kind::budget, key + " is no string; valid: bytes as a string, as in \"8589934592\" or \"8GiB\"");
  budget.automatic = text == "auto";
  if (!budget.automatic) budget.bytes = parse_bytes(text, key);
  return budget;
}

SessionRequest read_options(const BackendInitContext& context) {
  SessionRequest request;
  std::string text;
  for (const BackendOption& option : context.runtime_specs()) {
    std::string key(option.key, strnlen(option.key, sizeof option.key));
    BudgetRequest budget;
    if (key == kBudgetMbOption || key == kBudgetOption) {
      budget = read_budget(option, key);
    } else if (key.rfind(kOwnBudget, 0) == 0) {
      request.own_budgets[key.substr(std::strlen(kOwnBudget))] = read_budget(option, key);
    } else if (key == "weight_offload_device") {
      const int* index = std::get_if<int>(&option.value);
      if (!index || *index < 0) throw LoadError(Kind::option, "weight_offload_device is no int of 0 or more");
      request.device_index = *index;
    } else if (key == "weight_offload_host_memory_cap") {
      if (!as_text(option, text)) throw LoadError(Kind::option, "weight_offload_host_memory_cap is no string");
      request.host_cap_bytes = parse_bytes(text, key);
      if (!request.host_cap_bytes) throw LoadError(Kind::budget, "weight_offload_host_memory_cap is 0 bytes");
    } else if (key == "weight_offload_group") {
      if (!as_text(option, text)) throw LoadError(Kind::option, "weight_offload_group is no string");
      request.group = text;
    } else if (key == "weight_offload_quiet") {
      const bool* quiet = std::get_if<bool>(&option.value);
      if (!quiet) throw LoadError(Kind::option, "weight_offload_quiet is no bool");
      request.quiet = *quiet;
    } else if (key == "weight_offload_cuda_graph") {
      const bool* asked = std::get_if<bool>(&option.value);
      if (!asked) throw LoadError(Kind::option, "weight_offload_cuda_graph is no bool");
      request.cuda_graph = *asked;
    } else {
      throw LoadError(Kind::option, "there is no option '" + key + "'; " + kBackendName +
                                      " has weight_offload_budget_mb, weight_offload_budget, "
                                      "weight_offload_budget:DELEGATE, weight_offload_device, "
                                      "weight_offload_host_memory_cap, weight_offload_cuda_graph, "
                                      "weight_offload_group and weight_offload_quiet");
    }
    if (budget.is_given() && request.budget.is_given())
      throw LoadError(Kind::budget, "weight_offload_budget and weight_offload_budget_mb were both given; give one");
    if (budget.is_given()) request.budget = budget;
  }
  return request;
}

}  // namespace penstock_executorch
