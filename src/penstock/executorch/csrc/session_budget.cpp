// What a loaded session can be asked and told between runs.
#include "code.h"
#include "core.h"
#include "load_error.h"
#include "program_session.h"

namespace penstock_executorch {

SessionFacts ProgramSession::facts() const {
  std::lock_guard<std::mutex> hold(facts_lock_);
  return facts_;
}

bool ProgramSession::installs(size_t plan) {
  // Memory kept for the present plan may be in use.
  if (!plan_memory_.empty() && core().session_drain(handle())) return false;
  for (const auto& [owner, give_up] : plan_memory_) give_up();
  // Pages for weights come from the driver.
  give_back_cached_memory();
  const auto& [device_bytes, numbers, slots] = plans_[plan];
  if (!slots.count) return core().session_install(handle(), numbers.data(), (int64_t)numbers.size()) == 0;
  return core().session_install_with_slots(handle(), numbers.data(), (int64_t)numbers.size(), slots.count, slots.bytes,
                                           slots.total_bytes) == 0;
}

void ProgramSession::set_budget(const BudgetRequest& asked) {
  const auto stays = [this] { return "the budget of " + format_bytes(facts().budget_bytes) + " stays"; };
  const std::unique_lock<std::mutex> idle = between_runs(stays() + "; set another one");
  if (is_tracing_) throw LoadError(Kind::busy, "runs are being traced by the plan that is there: " + stays() +
                                                 "; stop the trace before you set another one");
  // Read only now: another thread may have set a budget while this one waited.
  SessionFacts made = facts();
  int64_t held_bytes = 0, peak_bytes = 0;
  if (core().session_memory(handle(), &held_bytes, &peak_bytes)) throw_core_failure();
  const PenstockBudget budget =
      choose_budget(asked, budget_terms_, PENSTOCK_BUDGET_CHANGE, PENSTOCK_NONE, held_bytes);
  const size_t before = (size_t)made.plan;
  made.asked_bytes = budget.asked_bytes;
  made.budget_bytes = budget.budget_bytes;
  made.source = budget.origin;
  made.plan = (int64_t)choose_plan(plans_, made.floor_bytes, made.budget_bytes);
  made.plan_bytes = plans_[(size_t)made.plan].device_bytes;
  const bool is_there = has_plan_ && (size_t)made.plan == before;
  // False until a plan is known to be there, because what gives memory up may throw.
  has_plan_ = is_there;
  if (!is_there && !installs((size_t)made.plan)) {
    const auto failure = (Failure)core().failure();
    const std::string reason = core().failure_text();
    has_plan_ = installs(before);
    if (!has_plan_)
      throw LoadError(failure, "neither the new budget (" + reason + ") nor the old one (" + core().failure_text() +
                                 ") could be installed; set another one before the next run");
    throw LoadError(failure, reason + "; the old budget stays");
  }
  has_plan_ = true;
  {
    std::lock_guard<std::mutex> hold(facts_lock_);
    facts_ = made;
  }
  // The new facts are set by now, even if the lines about them cannot be made.
  std::vector<std::string> news = lines_about(made);
  std::lock_guard<std::mutex> hold(facts_lock_);
  news_ = std::move(news);
}

std::vector<std::string> ProgramSession::lines_about(const SessionFacts& facts) {
  std::vector<const char*> names;
  for (const std::string& name : method_names_) names.push_back(name.c_str());
  const char* const remarks[] = {"replayed as CUDA graphs"};
  const PenstockSummary asked{shown_.c_str(), place_.c_str(), facts.floor_bytes,     facts.budget_bytes, facts.source,
                              copying_bytes_, names.data(),   (int64_t)names.size(), remarks,            cuda_graph_};
  const char* summary = core().session_summary(handle(), &asked);
  if (!summary) throw_core_failure();
  std::vector<std::string> lines{summary};
  if (!own_delegate_.empty()) lines.front() += " (of " + own_delegate_ + " alone)";
  PenstockBudget budget{};
  budget.budget_bytes = facts.budget_bytes;
  budget.asked_bytes = facts.asked_bytes;
  budget.origin = facts.source;
  const std::string clamped = core().clamp_sentence(&budget);
  if (!clamped.empty()) lines.push_back(clamped);
  lines.push_back("plan " + std::to_string(facts.plan + 1) + " of " + std::to_string(facts.plan_count) +
                  " in the file takes " + format_bytes(facts.plan_bytes) + ", " + weights_text_);
  return lines;
}

std::vector<std::string> ProgramSession::take_news() {
  std::lock_guard<std::mutex> hold(facts_lock_);
  std::vector<std::string> news;
  news.swap(news_);
  return quiet_ ? std::vector<std::string>{} : news;
}

std::unique_lock<std::mutex> ProgramSession::between_runs(const std::string& what) {
  if (is_running_) throw LoadError(Kind::busy, "a run is under way: " + what + " between runs");
  // Any other holder only asks, or sets a budget, and waits for no run.
  return std::unique_lock<std::mutex>(running_);
}

void ProgramSession::start_trace() {
  const auto idle = between_runs("start a trace");
  if (core().session_start_trace(handle())) throw_core_failure();
  is_tracing_ = true;
}

std::vector<int64_t> ProgramSession::stop_trace() {
  const auto idle = between_runs("stop a trace");
  is_tracing_ = false;
  if (core().session_stop_trace(handle())) throw_core_failure();
  constexpr int64_t kNumbers = 7, kMethod = 2;
  const int64_t count = core().session_spans(handle(), nullptr, 0);
  std::vector<int64_t> spans((size_t)(count * kNumbers));
  core().session_spans(handle(), spans.data(), count);
  // The core counts the delegates of this session.
  for (size_t at = kMethod; at < spans.size(); at += kNumbers) spans[at] = methods_[(size_t)spans[at]];
  return spans;
}

std::vector<int64_t> ProgramSession::link() {
  std::lock_guard<std::mutex> idle(running_);
  constexpr int64_t kNumbers = 3;
  const int64_t count = core().session_link(handle(), nullptr, 0);
  std::vector<int64_t> samples((size_t)(count * kNumbers));
  core().session_link(handle(), samples.data(), count);
  return samples;
}

SessionCounters ProgramSession::counters() {
  std::lock_guard<std::mutex> idle(running_);
  SessionCounters found{};
  if (core().session_counters(handle(), &found.last_run, &found.totals)) throw_core_failure();
  if (core().session_memory(handle(), &found.device_bytes, &found.peak_device_bytes)) throw_core_failure();
  // The first sample is of the plan itself.
  int64_t sample[3];
  if (core().session_link(handle(), sample, 1) > 0 && sample[2])
    found.link_bytes_per_s = (int64_t)((double)sample[1] * 1e9 / (double)sample[2]);
  return found;
}

std::shared_ptr<ProgramSession> only_session(const std::string& group, const std::string& delegate) {
  std::vector<std::shared_ptr<ProgramSession>> found;
  std::vector<std::string> alone;
  for (auto& session : sessions().find(group)) {
    if (session->own_delegate() == delegate) found.push_back(session);
    else if (delegate.empty()) alone.push_back(session->own_delegate());
  }
  if (found.size() == 1) return found.front();
  const std::string where = group.empty() ? "without a group" : "in group '" + group + "'";
  if (!found.empty())
    throw LoadError(Kind::option, std::to_string(found.size()) + " programs are loaded " + where +
                                    ": load each with a weight_offload_group of its own, and name it here");
  if (!delegate.empty())
    throw LoadError(Kind::option, "no delegate '" + delegate + "' that has a budget of its own is loaded " + where);
  if (!alone.empty())
    throw LoadError(Kind::option, "every delegate that is loaded " + where + " has a budget of its own: name one, of " +
                                    joined(alone, [](const std::string& name) { return name; }));
  throw LoadError(Kind::option, "no program is loaded " + where);
}

}  // namespace penstock_executorch
