// Makes a session of the core, for all delegates of a load or for one alone.
#include "program_session.h"

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

}  // namespace

ProgramSession::ProgramSession(const Payload& payload, const PlanTable& table, const BudgetRequest& asked,
                               const WeightsPlace& weights, const SessionRequest& request, int32_t device_index, bool alone)
    : device_index_(device_index), driver_(nullptr, core().driver_destroy), session_(nullptr, core().session_destroy),
      quiet_(request.quiet), cuda_graph_(request.cuda_graph), shown_(payload.shown) {
  const bool poison = poison_asked();
  const bool on_gpu = payload.device == "cuda";
  driver_.reset(on_gpu ? core().cuda_create(device_index) : core().soft_create((size_t)payload.page_bytes, 0, poison));
  if (!driver_ && !on_gpu) throw LoadError(Failure::driver, core().soft_error());
  if (!driver_) throw_core_failure();
  int64_t granularity = 0;
  if (core().driver_granularity(driver_.get(), &granularity)) throw_core_failure();
  if (granularity != payload.page_bytes)
    throw LoadError(Kind::build, "the program was planned for pages of " + std::to_string(payload.page_bytes) +
                                   " bytes, this device has pages of " + std::to_string(granularity));
  budget_terms_ = {table.floor_bytes, table.full_bytes, payload.activation_bytes, driver_.get(), on_gpu, cuda_graph_};
  const PenstockBudget budget =
      choose_budget(asked, budget_terms_, PENSTOCK_BUDGET_LOAD, payload.baked_bytes.value_or(PENSTOCK_NONE), 0);
  for (const StoredPlan& stored : table.plans) plans_.push_back(ready(stored));
  size_t plan = choose_plan(plans_, table.floor_bytes, budget.budget_bytes);
  if (core().load_torch()) throw_core_failure();
  const bool is_staged = request.host_cap_bytes > 0;
  PenstockOpenRequest opened{};
  opened.path = weights.path.c_str();
  opened.extents = reinterpret_cast<const int64_t*>(weights.spans.data());
  opened.extent_count = (int64_t)weights.spans.size();
  opened.host_cap_bytes = is_staged ? request.host_cap_bytes : -1;
  // Device memory of the soft driver is host memory, too. Inputs and outputs of runs pass through some more.
  opened.extra_host_bytes = on_gpu ? 0 : budget.budget_bytes;
  for (int64_t method : table.methods) opened.extra_host_bytes += payload.methods[(size_t)method].transfer_bytes;
  opened.packed = weights.packed.numbers.data();
  opened.packed_count = (int64_t)weights.packed.numbers.size();
  opened.root = "/";
  opened.device_index = device_index;
  opened.poison = poison;
  session_.reset(core().open(driver_.get(), &opened));
  if (!session_ || !installs(plan)) throw_core_failure();
  facts_ = {table.floor_bytes, table.full_bytes, budget.budget_bytes,         budget.asked_bytes,
            budget.origin,     (int64_t)plan,    (int64_t)table.plans.size(), table.plans[plan].device_bytes};
  place_ = on_gpu ? "cuda:" + std::to_string(device_index) : payload.device;
  weights_text_ = "weights from " + weights.path + (is_staged ? ", staged" : ", held in memory");
  copying_bytes_ = table.copying_bytes;
  methods_ = table.methods;
  for (int64_t method : table.methods) method_names_.push_back(payload.methods[(size_t)method].name);
  if (alone) own_delegate_ = method_names_.front();
  news_ = lines_about(facts_);
}

// Never destroyed: delegates may outlive static objects.
Sessions& sessions() {
  static Sessions* made = new Sessions;
  return *made;
}

Sessions::PlaceRef take_session(const Payload& payload, int64_t method, const WeightsPlace& weights,
                                const SessionRequest& request, int32_t device_index) {
  auto own = request.own_budgets.find(payload.methods[(size_t)method].name);
  bool alone = own != request.own_budgets.end();
  const BudgetRequest& asked = alone ? own->second : request.budget;
  std::vector<int64_t> methods{method};
  if (!alone) {
    methods.resize(payload.methods.size());
    std::iota(methods.begin(), methods.end(), int64_t{0});
  }
  int64_t budget = asked.automatic ? -2 : asked.bytes.value_or(-1);
  SessionKey key{payload.program, weights.device,       weights.inode, request.group,
                 budget,          alone ? method : -1, device_index,  request.host_cap_bytes, request.cuda_graph};
  return sessions().take(key, method, alone ? 0 : method, [&] {
    const PlanTable table = find_plan_table(payload, methods, request.host_cap_bytes > 0, weights.packed);
    return std::make_shared<ProgramSession>(payload, table, asked, weights, request, device_index, alone);
  });
}

}  // namespace penstock_executorch
