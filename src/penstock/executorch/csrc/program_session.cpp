#include "program_session.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "core.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

constexpr int64_t kPageBytes = 4096;
// The most that is registered in one call.
constexpr int64_t kChunkBytes = int64_t{64} << 30;

bool poison_asked() {
  const char* value = std::getenv("PENSTOCK_POISON");
  std::string text = value ? value : "0";
  if (text != "0" && text != "1") throw LoadError(Kind::option, "PENSTOCK_POISON is '" + text + "'; it must be 0 or 1");
  return text == "1";
}

// In whole pages, and never inside a weight: a copy that spans two registrations fails.
std::vector<int64_t> chunk_ends(const Payload& payload, const WeightsPlace& weights) {
  int64_t whole = (weights.file_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (size_t i = 0; i < weights.spans.size(); ++i)
    if (payload.weights[i].bytes)
      spans.emplace_back(weights.spans[i].begin_bytes / kPageBytes * kPageBytes,
                         (weights.spans[i].begin_bytes + weights.spans[i].bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  std::sort(spans.begin(), spans.end());
  std::vector<int64_t> ends;
  int64_t start = 0, reached = 0;
  for (auto [begin, end] : spans) {
    // A chunk may end where no weight that began before it is still going on.
    if (begin >= reached && end - start > kChunkBytes && begin > start) {
      ends.push_back(begin);
      start = begin;
    }
    reached = std::max(reached, end);
  }
  if (start < whole) ends.push_back(whole);
  return ends;
}

// As penstock.runtime.weights_source has it.
struct Staging {
  int64_t buffer_bytes = 0;
  int32_t buffers = 0;
  int32_t threads = 0;
};

Staging staging_of(int64_t cap_bytes) {
  constexpr int64_t kBufferBytes = int64_t{16} << 20, kLeastBuffers = 4, kReaders = 8;
  if (!cap_bytes) return {};
  Staging staging;
  staging.buffer_bytes = std::min(kBufferBytes, cap_bytes / kLeastBuffers / kPageBytes * kPageBytes);
  if (!staging.buffer_bytes)
    throw LoadError(Kind::budget, "weight_offload_host_memory_cap is " + std::to_string(cap_bytes) +
                                    " bytes; staging needs at least " + std::to_string(kLeastBuffers * kPageBytes));
  staging.buffers = (int32_t)(cap_bytes / staging.buffer_bytes);
  int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency() / 2);
  staging.threads = (int32_t)std::min({kReaders, (int64_t)staging.buffers, cores});
  return staging;
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
                               const WeightsPlace& weights, const SessionRequest& request, int32_t device_index)
    : device_index_(device_index) {
  bool poison = poison_asked();
  Staging staging = staging_of(request.host_cap_bytes);
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
    Budget budget = choose_budget(asked, payload, table, driver_);
    int64_t used_bytes = std::min(budget.asked_bytes, std::max(table.full_bytes, table.floor_bytes));
    for (const StoredPlan& stored : table.plans)
      plans_.push_back({stored.device_bytes, rebased(stored, weights.offsets, payload.weights)});
    size_t plan = choose_plan(plans_, table.floor_bytes, used_bytes);
    const std::vector<int64_t>& numbers = plans_[plan].numbers;
    if (core().load_torch()) throw_core_failure();
    std::vector<int64_t> ends = staging.buffers ? std::vector<int64_t>{} : chunk_ends(payload, weights);
    session_ = core().session_create(driver_, weights.path.c_str(), 0, ends.data(), (int64_t)ends.size(),
                                     staging.buffer_bytes, staging.buffers, staging.threads, device_index, poison,
                                     weights.packed.numbers.data(), (int64_t)weights.packed.numbers.size());
    if (!session_) throw_core_failure();
    if (core().session_install(session_, numbers.data(), (int64_t)numbers.size())) throw_core_failure();
    facts_.floor_bytes = table.floor_bytes;
    facts_.full_bytes = table.full_bytes;
    facts_.budget_bytes = used_bytes;
    facts_.asked_bytes = budget.asked_bytes;
    facts_.source = (int64_t)budget.source;
    facts_.plan = (int64_t)plan;
    facts_.plan_count = (int64_t)table.plans.size();
    facts_.plan_bytes = table.plans[plan].device_bytes;
    const char* origins[] = {"given at load", "baked at export", "automatic"};
    std::string place = payload.device == "cuda" ? "cuda:" + std::to_string(device_index) : payload.device;
    summary_ = payload.program + " on " + place + ": floor " + format_bytes(table.floor_bytes) +
               ", budget " + format_bytes(used_bytes) + " (" + origins[(int)budget.source] + "), plan " +
               std::to_string(plan + 1) + " of " + std::to_string(table.plans.size()) + " takes " +
               format_bytes(table.plans[plan].device_bytes) + " of " + format_bytes(table.full_bytes) +
               ", weights from " + weights.path + (staging.buffers ? ", staged" : ", held in memory");
    // penstock.Module tries registration in a process of its own first, and counts host memory; here nobody has.
    if (payload.device == "cuda" && !staging.buffers)
      summary_ += " (neither its size nor its registration was tried out before)";
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
                 budget,          alone ? method : -1, device_index,  request.host_cap_bytes};
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
    made = std::make_shared<ProgramSession>(payload, table, asked, weights, request, device_index);
  });
  made->taken().insert(method);
  if (alone) made->own_delegate() = payload.methods[(size_t)method].name;
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
