#include "program_session.h"

#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "core.h"
#include "refusal.h"

namespace penstock_executorch {
namespace {

constexpr int64_t kPageBytes = 4096;
// The most that is registered in one call.
constexpr int64_t kChunkBytes = int64_t{64} << 30;

bool poison_asked() {
  const char* value = std::getenv("PENSTOCK_POISON");
  std::string text = value ? value : "0";
  if (text != "0" && text != "1") throw Refusal(Kind::option, "PENSTOCK_POISON is '" + text + "'; it must be 0 or 1");
  return text == "1";
}

// In whole pages, and never inside a weight: a copy that spans two registrations fails.
std::vector<int64_t> chunk_ends(const Payload& payload, const WeightsPlace& weights) {
  int64_t whole = (weights.file_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (size_t i = 0; i < weights.offsets.size(); ++i)
    if (payload.weights[i].bytes)
      spans.emplace_back(weights.offsets[i] / kPageBytes * kPageBytes,
                         (weights.offsets[i] + payload.weights[i].bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
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

int32_t device_index_of(const Payload&) { return 0; }

using Key = std::tuple<std::string, uint64_t, uint64_t, std::string, int64_t>;

struct Registry {
  std::mutex lock;
  std::multimap<Key, std::weak_ptr<ProgramSession>> known;
};

// Never destroyed: delegates may go after static objects do.
Registry& registry() {
  static Registry* made = new Registry;
  return *made;
}

}  // namespace

ProgramSession::ProgramSession(const Payload& payload, const WeightsPlace& weights, const SessionRequest& request) {
  bool poison = poison_asked();
  int32_t index = device_index_of(payload);
  if (payload.device == "cuda") {
    driver_ = core().cuda_create(index);
    if (!driver_) throw_core_failure();
  } else {
    driver_ = core().soft_create((size_t)payload.page_bytes, 0, poison);
    if (!driver_) throw Refusal(Kind::core, core().soft_error(), 1);
  }
  try {
    int64_t granularity = core().driver_granularity(driver_);
    if (granularity != payload.page_bytes)
      throw Refusal(Kind::build, "the program was planned for pages of " + std::to_string(payload.page_bytes) +
                                     " bytes, this device has pages of " + std::to_string(granularity));
    Budget budget = choose_budget(request.budget, payload, driver_);
    int64_t used_bytes = std::min(budget.asked_bytes, std::max(payload.full_bytes, payload.floor_bytes));
    size_t rung = choose_rung(payload, used_bytes);
    std::vector<int64_t> numbers = rebased(payload.rungs[rung], weights.offsets, payload.weights);
    if (core().load_torch()) throw_core_failure();
    std::vector<int64_t> ends = chunk_ends(payload, weights);
    session_ = core().session_create(driver_, weights.path.c_str(), 0, ends.data(), (int64_t)ends.size(), 0, 0, 0,
                                     index, poison);
    if (!session_) throw_core_failure();
    if (core().session_install(session_, numbers.data(), (int64_t)numbers.size())) throw_core_failure();
    facts_.floor_bytes = payload.floor_bytes;
    facts_.full_bytes = payload.full_bytes;
    facts_.budget_bytes = used_bytes;
    facts_.asked_bytes = budget.asked_bytes;
    facts_.source = (int64_t)budget.source;
    facts_.rung = (int64_t)rung;
    facts_.rung_count = (int64_t)payload.rungs.size();
    facts_.rung_bytes = payload.rungs[rung].device_bytes;
    const char* origins[] = {"given at load", "baked at export", "automatic"};
    summary_ = payload.program + " on " + payload.device + ": floor " + format_bytes(payload.floor_bytes) +
               ", budget " + format_bytes(used_bytes) + " (" + origins[(int)budget.source] + "), plan " +
               std::to_string(rung + 1) + " of " + std::to_string(payload.rungs.size()) + " takes " +
               format_bytes(payload.rungs[rung].device_bytes) + " of " + format_bytes(payload.full_bytes) +
               ", weights from " + weights.path;
  } catch (...) {
    if (session_) core().session_destroy(session_);
    core().driver_destroy(driver_);
    throw;
  }
}

ProgramSession::~ProgramSession() {
  core().session_destroy(session_);
  core().driver_destroy(driver_);
}

Seat::~Seat() {
  std::lock_guard<std::mutex> hold(registry().lock);
  session_->taken().erase(method_);
  session_.reset();
}

std::unique_ptr<Seat> take_seat(const Payload& payload, int64_t method, const WeightsPlace& weights,
                                const SessionRequest& request) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.lock);
  for (auto it = all.known.begin(); it != all.known.end();)
    it = it->second.expired() ? all.known.erase(it) : std::next(it);
  int64_t budget = request.budget.automatic ? -2 : request.budget.bytes.value_or(-1);
  Key key{payload.program, weights.device, weights.inode, request.group, budget};
  auto [begin, end] = all.known.equal_range(key);
  for (auto it = begin; it != end; ++it)
    if (std::shared_ptr<ProgramSession> session = it->second.lock())
      if (session->taken().insert(method).second) return std::make_unique<Seat>(std::move(session), method);
  auto made = std::make_shared<ProgramSession>(payload, weights, request);
  made->taken().insert(method);
  all.known.emplace(key, made);
  return std::make_unique<Seat>(std::move(made), method);
}

std::shared_ptr<ProgramSession> find_session(const std::string& group) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.lock);
  for (auto& [key, known] : all.known)
    if (std::get<3>(key) == group)
      if (auto session = known.lock()) return session;
  return nullptr;
}

}  // namespace penstock_executorch
