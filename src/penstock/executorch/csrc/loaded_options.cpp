// Answers set_option and get_option.
#include "loaded_options.h"

#include <cstring>
#include <map>

#include "load_error.h"
#include "load_options.h"

namespace penstock_executorch {
namespace {

using executorch::runtime::BackendOption;
using executorch::runtime::Span;

constexpr const char* kGroupOption = "weight_offload_group";

struct Key {
  std::string whole;
  // What is before a colon.
  std::string option;
  // After a colon; empty where delegates share a session.
  std::string delegate;
};

Key key_of(const BackendOption& option) {
  std::string key(option.key, strnlen(option.key, sizeof option.key));
  size_t colon = key.find(':');
  return {key, key.substr(0, colon), colon == std::string::npos ? "" : key.substr(colon + 1)};
}

std::string group_of(const Span<BackendOption>& options) {
  std::string group;
  for (const BackendOption& option : options)
    if (key_of(option).option == kGroupOption && !as_text(option, group))
      throw LoadError(Kind::option, std::string(kGroupOption) + " is no string");
  return group;
}

std::map<std::string, int64_t> figures(ProgramSession& session) {
  const SessionCounters counted = session.counters();
  const SessionFacts facts = session.facts();
  std::map<std::string, int64_t> found{
      {"weight_offload_budget", facts.budget_bytes},
      {"weight_offload_floor_bytes", facts.floor_bytes},
      {"weight_offload_full_bytes", facts.full_bytes},
      {"weight_offload_plan", facts.plan + 1},
      {"weight_offload_plan_count", facts.plan_count},
      {"weight_offload_device_bytes", counted.device_bytes},
      {"weight_offload_peak_device_bytes", counted.peak_device_bytes},
      {"weight_offload_link_bytes_per_s", counted.link_bytes_per_s},
      {"weight_offload_runs", counted.totals.runs},
      {"weight_offload_replays", counted.totals.replays},
  };
  // The counters that mean something for a plan.
  using Counters = PenstockCounters;
  const std::map<std::string, int64_t Counters::*> counters{
      {"bytes_streamed", &Counters::bytes_streamed}, {"bytes_hit", &Counters::bytes_hit},
      {"copies", &Counters::copies},                 {"stall_ns", &Counters::stall_ns},
      {"bytes_in_place", &Counters::bytes_in_place}, {"bytes_decoded", &Counters::bytes_decoded},
      {"expert_hits", &Counters::expert_hits},       {"expert_misses", &Counters::expert_misses},
      {"expert_bytes", &Counters::expert_bytes}};
  for (const auto& [name, counter] : counters) {
    found["weight_offload_" + name] = counted.totals.*counter;
    found["weight_offload_last_run_" + name] = counted.last_run.*counter;
  }
  return found;
}

}  // namespace

std::vector<std::string> set_loaded_options(const Span<BackendOption>& options) {
  std::optional<BudgetRequest> budget;
  std::string delegate;
  for (const BackendOption& option : options) {
    const Key key = key_of(option);
    if (key.option == kGroupOption) continue;
    // Those that there are at load: MiB are for the program alone.
    if (key.option != kBudgetOption && key.whole != kBudgetMbOption)
      throw LoadError(Kind::option, "'" + key.whole + "' cannot be set of a loaded program; weight_offload_budget, " +
                                      "weight_offload_budget:DELEGATE and weight_offload_budget_mb can, with " +
                                      "weight_offload_group");
    if (budget) throw LoadError(Kind::budget, "two budgets were given; set one at a time");
    budget = read_budget(option, key.whole);
    delegate = key.delegate;
  }
  if (!budget) throw LoadError(Kind::option, "no budget was given; set weight_offload_budget or weight_offload_budget_mb");
  const std::shared_ptr<ProgramSession> session = only_session(group_of(options), delegate);
  session->set_budget(*budget);
  return session->take_news();
}

void get_loaded_options(Span<BackendOption>& options) {
  const std::string group = group_of(options);
  std::map<std::string, std::map<std::string, int64_t>> known;
  for (BackendOption& option : options) {
    const Key key = key_of(option);
    if (key.option == kGroupOption) continue;
    if (!known.count(key.delegate)) known[key.delegate] = figures(*only_session(group, key.delegate));
    auto found = known[key.delegate].find(key.option);
    if (found == known[key.delegate].end())
      throw LoadError(Kind::option, "there is no figure '" + key.option + "'; there are " +
                                      joined(known[key.delegate], [](const auto& figure) { return figure.first; }));
    std::array<char, executorch::runtime::kMaxOptionValueLength> text{};
    const std::string value = std::to_string(found->second);
    std::memcpy(text.data(), value.data(), value.size());
    option.value = text;
  }
}

}  // namespace penstock_executorch
