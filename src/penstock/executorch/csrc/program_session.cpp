#include "program_session.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <numeric>

#include "core.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

bool poison_asked() {
  const char* value = std::getenv("PENSTOCK_POISON");
  std::string text = value ? value : "0";
  if (text != "0" && text != "1") throw LoadError(Kind::option, "PENSTOCK_POISON is '" + text + "'; it must be 0 or 1");
  return text == "1";
}

// Everything of the file that is copied from, for the core.
std::vector<int64_t> extents_of(const WeightsPlace& weights) {
  std::vector<int64_t> numbers;
  for (const WeightsPlace::Span& span : weights.spans) {
    numbers.push_back(span.begin_bytes);
    numbers.push_back(span.bytes);
  }
  return numbers;
}

struct SharedSession {
  std::shared_ptr<ProgramSession> session;
  std::vector<int64_t> methods;
};

struct Registry {
  std::mutex lock;
  std::multimap<SessionKey, std::weak_ptr<ProgramSession>> known;
  std::multimap<std::string, SharedSession> lent;
  // Sessions that are being made or given up, which takes as long as reading their weights does: without the lock, and
  // whoever wants one of the same key waits. So no budget is taken twice, and no other program is held up.
  std::set<SessionKey> busy;
  std::condition_variable changed;
};

// Never destroyed: delegates may go after static objects do.
Registry& registry() {
  static Registry* made = new Registry;
  return *made;
}

// Does the work without the lock, and has whoever comes for the same key wait until it has ended.
template <typename Work>
void busy_with(const SessionKey& key, std::unique_lock<std::mutex>& hold, Work&& work) {
  Registry& all = registry();
  all.busy.insert(key);
  hold.unlock();
  struct Ends {
    const SessionKey& key;
    std::unique_lock<std::mutex>& hold;
    ~Ends() {
      hold.lock();
      registry().busy.erase(key);
      registry().changed.notify_all();
    }
  } ends{key, hold};
  work();
}

}  // namespace

ProgramSession::ProgramSession(const Payload& payload, const PlanTable& table, const BudgetRequest& asked,
                               const WeightsPlace& weights, const SessionRequest& request, int32_t device_index, bool alone)
    : device_index_(device_index), quiet_(request.quiet), cuda_graph_(request.cuda_graph), shown_(payload.shown) {
  bool poison = poison_asked();
  if (payload.device == "cuda") {
    driver_ = core().cuda_create(device_index);
    if (!driver_) throw_core_failure();
  } else {
    driver_ = core().soft_create((size_t)payload.page_bytes, 0, poison);
    if (!driver_) throw LoadError(Kind::core, core().soft_error(), 1);
  }
  try {
    int64_t granularity = 0;
    if (core().driver_granularity(driver_, &granularity)) throw_core_failure();
    if (granularity != payload.page_bytes)
      throw LoadError(Kind::build, "the program was planned for pages of " + std::to_string(payload.page_bytes) +
                                     " bytes, this device has pages of " + std::to_string(granularity));
    const PenstockBudget budget = choose_budget(asked, payload, table, driver_, cuda_graph_);
    for (const StoredPlan& stored : table.plans) plans_.push_back(ready(stored));
    size_t plan = choose_plan(plans_, table.floor_bytes, budget.budget_bytes);
    if (core().load_torch()) throw_core_failure();
    const std::vector<int64_t> extents = extents_of(weights);
    const bool is_staged = request.host_cap_bytes > 0;
    PenstockOpenRequest opened{};
    opened.path = weights.path.c_str();
    opened.extents = extents.data();
    opened.extent_count = (int64_t)weights.spans.size();
    opened.host_cap_bytes = is_staged ? request.host_cap_bytes : -1;
    // The soft driver's device memory is host memory, too; and runs are given and return what passes through some.
    opened.extra_host_bytes = payload.device == "cpu" ? budget.budget_bytes : 0;
    for (int64_t method : table.methods) opened.extra_host_bytes += payload.methods[(size_t)method].transfer_bytes;
    opened.packed = weights.packed.numbers.data();
    opened.packed_count = (int64_t)weights.packed.numbers.size();
    opened.root = "/";
    opened.device_index = device_index;
    opened.poison = poison;
    session_ = core().open(driver_, &opened);
    if (!session_) throw_core_failure();
    if (!installs(plan)) throw_core_failure();
    facts_.floor_bytes = table.floor_bytes;
    facts_.full_bytes = table.full_bytes;
    facts_.budget_bytes = budget.budget_bytes;
    facts_.asked_bytes = budget.asked_bytes;
    facts_.source = budget.origin;
    facts_.plan = (int64_t)plan;
    facts_.plan_count = (int64_t)table.plans.size();
    facts_.plan_bytes = table.plans[plan].device_bytes;
    place_ = payload.device == "cuda" ? "cuda:" + std::to_string(device_index) : payload.device;
    weights_text_ = "weights from " + weights.path + (is_staged ? ", staged" : ", held in memory");
    copying_bytes_ = table.copying_bytes;
    for (int64_t method : table.methods) method_names_.push_back(payload.methods[(size_t)method].name);
    if (alone) own_delegate_ = method_names_.front();
    news_ = lines_about(facts_);
  } catch (...) {
    if (session_) core().session_destroy(session_);
    core().driver_destroy(driver_);
    throw;
  }
}

ProgramSession::~ProgramSession() {
  if (!driver_) return;
  core().session_destroy(session_);
  core().driver_destroy(driver_);
}

SessionRef::~SessionRef() {
  Registry& all = registry();
  std::unique_lock<std::mutex> hold(all.lock);
  session_->taken().erase(method_);
  // Somebody may join while this waits.
  if (key_) all.changed.wait(hold, [&] { return !all.busy.count(*key_); });
  if (key_ && session_->taken().empty()) busy_with(*key_, hold, [&] { session_.reset(); });
  // Not the last of them. Under the lock all the same: the last must be the one that finds itself alone.
  session_.reset();
}

std::unique_ptr<SessionRef> take_session_ref(const Payload& payload, int64_t method, const WeightsPlace& weights,
                                const SessionRequest& request, int32_t device_index) {
  auto own = request.own_budgets.find(payload.methods[(size_t)method].name);
  bool alone = own != request.own_budgets.end();
  const BudgetRequest& asked = alone ? own->second : request.budget;
  std::vector<int64_t> methods{method};
  if (!alone) {
    methods.resize(payload.methods.size());
    std::iota(methods.begin(), methods.end(), int64_t{0});
  }
  Registry& all = registry();
  int64_t budget = asked.automatic ? -2 : asked.bytes.value_or(-1);
  SessionKey key{payload.program, weights.device,       weights.inode, request.group,
                 budget,          alone ? method : -1, device_index,  request.host_cap_bytes, request.cuda_graph};
  int64_t number = alone ? 0 : method;
  std::unique_lock<std::mutex> hold(all.lock);
  all.changed.wait(hold, [&] { return !all.busy.count(key); });
  for (auto it = all.known.begin(); it != all.known.end();)
    it = it->second.expired() ? all.known.erase(it) : std::next(it);
  auto [begin, end] = all.known.equal_range(key);
  for (auto it = begin; it != end; ++it)
    if (std::shared_ptr<ProgramSession> session = it->second.lock())
      if (session->taken().insert(method).second)
        return std::make_unique<SessionRef>(std::move(session), method, number, key);
  const PlanTable table = find_plan_table(payload, methods, request.host_cap_bytes > 0, weights.packed);
  std::shared_ptr<ProgramSession> made;
  busy_with(key, hold, [&] {
    made = std::make_shared<ProgramSession>(payload, table, asked, weights, request, device_index, alone);
  });
  made->taken().insert(method);
  all.known.emplace(key, made);
  return std::make_unique<SessionRef>(std::move(made), method, number, key);
}

void lend_session(const std::string& group, void* session, int32_t device_index, const std::vector<int64_t>& methods) {
  auto lent = std::make_shared<ProgramSession>(session, device_index);
  std::lock_guard<std::mutex> hold(registry().lock);
  registry().lent.emplace(group, SharedSession{std::move(lent), methods});
}

void reclaim_sessions(const std::string& group) {
  std::lock_guard<std::mutex> hold(registry().lock);
  registry().lent.erase(group);
}

std::unique_ptr<SessionRef> take_shared_session_ref(const std::string& group, int64_t method) {
  std::lock_guard<std::mutex> hold(registry().lock);
  auto [begin, end] = registry().lent.equal_range(group);
  if (begin == end) return nullptr;
  for (auto it = begin; it != end; ++it) {
    const std::vector<int64_t>& methods = it->second.methods;
    auto found = std::find(methods.begin(), methods.end(), method);
    if (found != methods.end())
      return std::make_unique<SessionRef>(it->second.session, method, (int64_t)(found - methods.begin()));
  }
  throw LoadError(Kind::package, "no session was made for delegate " + std::to_string(method) + " of the program");
}

std::vector<std::shared_ptr<ProgramSession>> find_sessions(const std::string& group) {
  std::vector<std::shared_ptr<ProgramSession>> found;
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.lock);
  for (auto& [key, known] : all.known)
    if (std::get<3>(key) == group)
      if (auto session = known.lock()) found.push_back(std::move(session));
  return found;
}

std::shared_ptr<ProgramSession> find_session(const std::string& group) {
  auto found = find_sessions(group);
  return found.empty() ? nullptr : found.front();
}

}  // namespace penstock_executorch
