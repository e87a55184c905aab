// registry_probe: the delegate's sessions, over a core that does nothing but what a test tells it to.
// Ends with 0 when every play went right; PENSTOCK_MUTANT, in builds with mutants, switches one on.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "core.h"
#include "program_session.h"
#include "load_error.h"

#ifdef WITH_MUTANTS
extern "C" int penstock_mutant;
#endif

namespace penstock_executorch {
namespace {

// The fake core's sessions: creating or destroying one of a path that begins with "held" stops there until it is let go.
struct Fakes {
  std::mutex lock;
  std::condition_variable changed;
  int made = 0, open = 0, most = 0, stopped = 0;
  bool let_go = true;
  // Of the next calls of install, how many are refused, and how many there were.
  std::atomic<int> refused_installs{0}, installs{0};
  std::atomic<bool> is_below_floor{false};
  // What was done to change a plan, in the order of the calls.
  std::string changes;
  // The next call of summary is refused; calls of counters wait until they are let go, and so does the next of install.
  std::atomic<bool> refuses_summary{false}, holds_counters{false}, holds_install{false};

  void pass(bool held) {
    std::unique_lock<std::mutex> hold(lock);
    if (!held) return;
    stopped++;
    changed.notify_all();
    changed.wait(hold, [&] { return let_go; });
    stopped--;
  }
  void stop() {
    std::lock_guard<std::mutex> hold(lock);
    let_go = false;
  }
  void go_on() {
    std::lock_guard<std::mutex> hold(lock);
    let_go = true;
    changed.notify_all();
  }
  void await_stopped(int count) {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [&] { return stopped >= count; });
  }
} fakes;

struct Session {
  std::string path;
  std::vector<int64_t> extents;
  int32_t poison;
};

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

Core fake() {
  Core core{};
  core.failure = [] { return fakes.is_below_floor.exchange(false) ? 12 : 1; };
  core.failure_text = [] { return "a test asked for this failure"; };
  core.load_torch = [] { return 0; };
  core.soft_create = [](size_t, size_t, int32_t) { return (void*)new int; };
  core.soft_error = [] { return ""; };
  core.driver_destroy = [](void* driver) { delete static_cast<int*>(driver); };
  core.driver_granularity = [](void*, int64_t* bytes) {
    *bytes = 4096;
    return 0;
  };
  core.budget_origin = [](int64_t given_bytes, int64_t origin, int64_t) -> int64_t {
    if (given_bytes == PENSTOCK_AUTOMATIC) return PENSTOCK_BUDGET_AUTOMATIC;
    return given_bytes >= 0 ? origin : PENSTOCK_BUDGET_BAKED;
  };
  core.driver_memory = [](void*, int64_t* free_bytes, int64_t* total_bytes) {
    *free_bytes = 6000;
    *total_bytes = 1 << 20;
    return 0;
  };
  core.reserve_bytes = [](int64_t total_bytes, int32_t on_gpu) { return on_gpu ? int64_t{-1} : total_bytes >> 10; };
  core.session_memory = [](void*, int64_t* held_bytes, int64_t* peak_bytes) {
    *held_bytes = *peak_bytes = 8192;
    return 0;
  };
  core.format_bytes = [](int64_t) { return ""; };
  core.clamp_sentence = [](const PenstockBudget*) { return ""; };
  core.session_summary = [](void*, const PenstockSummary* summary) {
    return fakes.refuses_summary.exchange(false) ? nullptr : summary->name;
  };
  // As the core has it: what is more than all weights take is not used.
  core.choose_budget = [](PenstockBudget* budget) {
    budget->origin = penstock_executorch::core().budget_origin(budget->given_bytes, budget->origin, budget->baked_bytes);
    budget->asked_bytes = budget->given_bytes >= 0 ? budget->given_bytes : budget->baked_bytes;
    if (budget->origin == PENSTOCK_BUDGET_AUTOMATIC)
      budget->asked_bytes = budget->free_bytes + budget->held_bytes - budget->activation_bytes - budget->reserve_bytes;
    budget->budget_bytes = std::min(budget->asked_bytes, budget->full_bytes);
    fakes.is_below_floor = budget->asked_bytes < budget->floor_bytes;
    return fakes.is_below_floor ? 1 : 0;
  };
  core.open = [](void*, const PenstockOpenRequest* request) -> void* {
    std::string name = request->path;
    if (name == "bad") return nullptr;
    {
      std::lock_guard<std::mutex> hold(fakes.lock);
      fakes.made++;
      fakes.most = std::max(fakes.most, ++fakes.open);
    }
    fakes.pass(name.rfind("held", 0) == 0);
    return new Session{name, {request->extents, request->extents + 2 * request->extent_count}, request->poison};
  };
  core.session_drain = [](void*) {
    fakes.changes += "drain ";
    return 0;
  };
  core.session_counters = [](void*, PenstockCounters*, PenstockCounters*) {
    fakes.pass(fakes.holds_counters);
    return 0;
  };
  core.session_link = [](void*, int64_t*, int64_t) { return int64_t{0}; };
  core.session_install = [](void* session, const int64_t*, int64_t) {
    fakes.installs++;
    fakes.changes += "install ";
    fakes.pass(fakes.holds_install.exchange(false));
    if (fakes.refused_installs > 0 && fakes.refused_installs--) return 1;
    return static_cast<Session*>(session)->path == "bad plan" ? 1 : 0;
  };
  core.session_start_trace = [](void*) { return 0; };
  core.session_stop_trace = [](void*) { return 0; };
  core.session_spans = [](void*, int64_t*, int64_t) { return int64_t{0}; };
  core.session_destroy = [](void* session) {
    auto* made = static_cast<Session*>(session);
    fakes.pass(made->path.rfind("held", 0) == 0);
    delete made;
    std::lock_guard<std::mutex> hold(fakes.lock);
    fakes.open--;
  };
  return core;
}

Payload program(const std::string& name) {
  Payload payload{};
  payload.program = name;
  payload.device = "cpu";
  payload.page_bytes = 4096;
  payload.baked_bytes = 8192;
  payload.activation_bytes = 100;
  payload.weights = {{"a", {"a"}, 6, {1024}, {0}, 4096}, {"none", {"none"}, 6, {0}, {0}, 0}};
  payload.methods = {{"one", {}, {}, 1, 100}, {"two", {}, {}, 1, 20}};
  payload.plan_tables = {{{0, 1}, {}, 4096, 8192, 0, {{4096, true, 0, 0}, {8192, true, 0, 0}}},
                         {{1}, {}, 2048, 8192, 0, {{2048, true, 0, 0}}}};
  return payload;
}

WeightsPlace at(const std::string& path) { return {path, 1, std::hash<std::string>()(path), 6000, {{0, 4096}, {4096, 1904}}, {}}; }

Sessions::PlaceRef place(const std::string& path, int64_t method, const SessionRequest& request = {}) {
  return take_session(program("program"), method, at(path), request, 0);
}

// A thread, and a way to see that it can only wait.
class Worker {
 public:
  template <typename Work>
  explicit Worker(Work work)
      : thread_([this, work] {
          id_ = (int)syscall(SYS_gettid);
          work();
          done_ = true;
        }) {}
  ~Worker() { thread_.join(); }
  bool done() const { return done_; }
  void await_blocked() {
    // Asleep in a lock, or through: what it could do it has done. Several times over, for it may sleep on its way.
    for (int asleep = 0; asleep < 16 && !done_;) {
      std::this_thread::yield();
      if (!id_) continue;
      std::ifstream file("/proc/self/task/" + std::to_string(id_) + "/syscall");
      std::string call;
      asleep = file >> call && call == std::to_string(SYS_futex) ? asleep + 1 : 0;
    }
  }

 private:
  std::atomic<int> id_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

void a_load_holds_up_nobody_else() {
  fakes.stop();
  Sessions::PlaceRef slow, other;
  Worker loading([&] { slow = place("held", 0); });
  fakes.await_stopped(1);
  // Another file, what is shared, and a search: all of them while the load goes on.
  other = place("other", 0);
  expect(!sessions().find("").empty(), "the session beside the load is not found");
  expect(!sessions().take_shared("nobody", 0), "a session_ref was shared by nobody");
  other.reset();
  expect(!loading.done(), "the load was not held");
  fakes.go_on();
}

void who_shares_a_session_waits_for_its_load() {
  int made = fakes.made;
  fakes.stop();
  Sessions::PlaceRef first, second;
  {
    Worker loading([&] { first = place("held", 0); });
    fakes.await_stopped(1);
    Worker joining([&] { second = place("held", 1); });
    joining.await_blocked();
    expect(!joining.done(), "a session_ref was had in a session that was not loaded");
    fakes.go_on();
  }
  expect(fakes.made == made + 1 && &**first == &**second, "two delegates made two sessions");
  expect(first->number() == 0 && second->number() == 1, "delegates are counted wrongly");
  // A place that is taken needs a session of its own; so does a delegate with its own budget.
  auto again = place("held", 1);
  expect(&**again != &**first, "one place was given twice");
  SessionRequest request;
  request.own_budgets["two"].bytes = 8192;
  auto alone = place("held", 1, request);
  expect(alone->number() == 0 && fakes.made == made + 3, "a delegate with a budget of its own shares");
  expect((*alone)->facts().floor_bytes == 2048, "a delegate that is alone has the plans of all");
  auto beside = place("held", 0, request);
  expect(&**beside == &**again, "a free place was not used");
  second.reset();
  auto back = place("held", 1);
  expect(&**back == &**first, "a place that was given back was not used");
  // Another budget is another loading.
  SessionRequest automatic, given;
  automatic.budget.automatic = true;
  given.budget.bytes = 8192;
  const auto by_itself = place("file", 0), of_auto = place("file", 1, automatic), of_bytes = place("file", 1, given);
  expect(&**by_itself != &**of_auto && &**by_itself != &**of_bytes && &**of_auto != &**of_bytes,
         "loadings with different budgets share a session");
  // Also where a delegate's own is the same number.
  given.own_budgets["two"].bytes = 8192;
  const auto shared = place("other", 0, given), own = place("other", 1, given);
  expect(&**shared != &**own, "a delegate with a budget of its own shares");
}

void no_budget_is_taken_twice() {
  expect(fakes.open == 0, "sessions are left");
  fakes.most = 0;
  auto old = place("held", 0);
  auto second = place("held", 1);
  second.reset();
  expect(fakes.open == 1, "a session went before its last delegate");
  fakes.stop();
  Sessions::PlaceRef next, other;
  {
    Worker closing([&] { old.reset(); });
    fakes.await_stopped(1);
    // Giving up is as long as loading: nobody else waits for it, and whoever loads the same does.
    other = place("other", 0);
    other.reset();
    fakes.most = 1;
    Worker loading([&] { next = place("held", 0); });
    loading.await_blocked();
    expect(!loading.done() && fakes.open == 1, "a session was made while the one before it was given up");
    fakes.go_on();
  }
  expect(fakes.most == 1, "two sessions had the budget at once");
}

void whoever_asks_a_session_is_waited_for() {
  fakes.most = 0;
  auto old = place("asked", 0);
  auto found = sessions().find("");
  expect(found.size() == 1, "a session is not found");
  Sessions::PlaceRef next;
  {
    Worker closing([&] { old.reset(); });
    closing.await_blocked();
    Worker loading([&] { next = place("asked", 0); });
    loading.await_blocked();
    expect(!closing.done() && !loading.done() && fakes.open == 1, "a session was given up, or made, beside one that is in use");
    expect(sessions().find("").empty(), "a session is found that is given up");
    found.clear();
  }
  expect(next && fakes.most == 1, "two sessions had the budget at once");
}

void two_may_leave_at_once() {
  auto first = place("held", 0), second = place("held", 1);
  fakes.stop();
  Sessions::PlaceRef again;
  {
    Worker loading([&] { again = place("held", 0, {}); });
    fakes.await_stopped(1);
    // Both have left before either may take it down.
    Worker one([&] { first.reset(); });
    one.await_blocked();
    Worker other([&] { second.reset(); });
    other.await_blocked();
    expect(!one.done() && !other.done(), "a session was given up while one of the same was made");
    fakes.go_on();
  }
  again.reset();
  expect(fakes.open == 0, "sessions are left");
}

void a_load_that_fails_leaves_nothing() {
  for (const char* path : {"bad", "bad plan"})
    for (int time = 0; time < 2; ++time) {
      try {
        place(path, 0);
        expect(false, "a failure of the core went unnoticed");
      } catch (const LoadError& refusal) {
        expect(refusal.kind == Kind::core, "the failure is told as another");
      }
    }
  expect(fakes.open == 0, "a failed load left a session");
}

// Of the last refusal.
std::string said;

// Bytes, or an automatic one.
Kind refusal_of(ProgramSession& session, std::optional<int64_t> budget_bytes) {
  try {
    session.set_budget({budget_bytes, !budget_bytes});
    return Kind::none;
  } catch (const LoadError& refusal) {
    said = refusal.what();
    return refusal.kind;
  }
}

void a_budget_is_set_between_runs() {
  SessionRequest request;
  request.group = "budgets";
  request.own_budgets["two"].bytes = 2048;
  auto shared = place("file", 0, request), own = place("file", 1, request);
  expect(sessions().find("budgets").size() == 2 && sessions().find("").empty(), "a group has the sessions of another");
  expect((*shared)->own_delegate().empty(), "a session that is shared has one delegate's name");
  expect((*own)->own_delegate() == "two", "a delegate's own session has another name");
  expect((*own)->facts().asked_bytes == 2048, "a delegate's own budget is another");
  ProgramSession& session = **shared;
  const auto is_at = [&](int64_t budget_bytes, int64_t plan) {
    const SessionFacts facts = session.facts();
    return facts.budget_bytes == budget_bytes && facts.plan == plan && facts.plan_bytes == 4096 * (plan + 1);
  };
  expect(is_at(8192, 1), "the budget at load is another");
  {
    const ProgramSession::Run run(session);
    Worker setting([&] { expect(refusal_of(session, 4096) == Kind::busy, "a budget was set during a run"); });
  }
  session.start_trace();
  expect(session.is_tracing() && refusal_of(session, 4096) == Kind::busy, "a budget was set under a trace");
  expect(session.stop_trace().empty() && !session.is_tracing(), "a trace goes on");
  {
    const ProgramSession::Run run(session);
    Worker tracing([&] {
      try {
        session.start_trace();
        expect(false, "a trace was started during a run");
      } catch (const LoadError& refusal) {
        expect(refusal.kind == Kind::busy, "the refusal is told as another");
      }
    });
  }
  expect(refusal_of(session, 4095) == Kind::below_floor, "a budget below the floor was set");
  expect(is_at(8192, 1), "a budget that was refused has changed something");
  int installs = fakes.installs;
  expect(refusal_of(session, 5000) == Kind::none && is_at(5000, 0), "the smaller plan was not taken");
  expect(refusal_of(session, 6000) == Kind::none && is_at(6000, 0), "another budget changed the plan");
  expect(fakes.installs == installs + 1, "a plan was installed that was there");
  fakes.refused_installs = 1;
  expect(refusal_of(session, 9000) == Kind::core && is_at(6000, 0), "a plan that the core refused was taken");
  expect(fakes.installs == installs + 3, "the old plan was not put back");
  expect(said == "a test asked for this failure; the old budget stays", "the refusal is told otherwise");
  fakes.refused_installs = 2;
  expect(refusal_of(session, 9000) == Kind::core && said.rfind("neither the new budget (", 0) == 0,
         "nothing was said of a session without a plan");
  installs = fakes.installs;
  expect(refusal_of(session, 6000) == Kind::none && fakes.installs == installs + 1, "no plan was put in the place of none");
  expect(refusal_of(session, 9000) == Kind::none && is_at(8192, 1), "more than everything was not taken for everything");
}

void two_budgets_are_set_one_after_the_other() {
  SessionRequest request;
  request.group = "two budgets";
  auto held = place("file", 0, request);
  ProgramSession& session = **held;
  fakes.stop();
  fakes.holds_install = true;
  {
    Worker first([&] { expect(refusal_of(session, 4096) == Kind::none, "a budget was refused"); });
    fakes.await_stopped(1);
    const int installs = fakes.installs;
    Worker second([&] { expect(refusal_of(session, 8192) == Kind::none, "a budget was refused"); });
    second.await_blocked();
    expect(!second.done() && fakes.installs == installs, "two plans were installed at once");
    fakes.go_on();
  }
  // By what the first has left, not by what was there when the second began to wait.
  expect(fakes.changes.ends_with("install give_back install "), "the plan of the first is there, and said to be the second's");
  expect(session.facts().plan == 1 && session.facts().budget_bytes == 8192, "the plan that is there is said to be another");
}

void no_plan_is_said_to_be_there_that_may_not_be() {
  SessionRequest request;
  request.group = "no plan";
  auto held = place("file", 0, request);
  ProgramSession& session = **held;
  int given_up = 0;
  session.plan_memory()[&request] = [&] {
    if (++given_up == 2) throw std::bad_alloc();
  };
  fakes.refused_installs = 1;
  try {
    session.set_budget({4096, false});
    expect(false, "nothing was refused");
  } catch (const std::bad_alloc&) {
  }
  const int installs = fakes.installs;
  expect(refusal_of(session, 8192) == Kind::none && fakes.installs == installs + 1, "no plan was put in the place of none");
}

void whoever_keeps_memory_for_a_plan_gives_it_up() {
  SessionRequest request;
  request.group = "memory";
  auto held = place("file", 0, request);
  ProgramSession& session = **held;
  session.plan_memory()[&request] = [] { fakes.changes += "give_up "; };
  fakes.changes.clear();
  expect(refusal_of(session, 4096) == Kind::none, "a budget was refused");
  expect(fakes.changes == "drain give_up give_back install ", "another plan was installed beside what was kept");
  // The plan that is put back is another one as well: the core has given up what it had.
  fakes.refused_installs = 1;
  fakes.changes.clear();
  expect(refusal_of(session, 8192) == Kind::core, "a plan that the core refused was taken");
  expect(fakes.changes == "drain give_up give_back install drain give_up give_back install ", "put back otherwise");
  session.plan_memory().clear();
  fakes.changes.clear();
  expect(refusal_of(session, 8192) == Kind::none && fakes.changes == "give_back install ", "nobody was waited for");
}

void an_automatic_budget_is_set() {
  SessionRequest request;
  request.group = "automatic";
  auto held = place("file", 0, request);
  // What weights hold is free as soon as another plan comes: 6000 + 8192 - 100 - 1024.
  expect(refusal_of(**held, {}) == Kind::none, "an automatic budget was refused");
  const SessionFacts facts = (*held)->facts();
  expect(facts.asked_bytes == 13068 && facts.budget_bytes == 8192, "another budget was found");
  expect(facts.source == PENSTOCK_BUDGET_AUTOMATIC, "it is said to come from somewhere else");
}

void who_only_asks_is_no_run() {
  SessionRequest request;
  request.group = "asks";
  auto held = place("file", 0, request);
  fakes.stop();
  fakes.holds_counters = true;
  {
    Worker asking([&] { (*held)->counters(); });
    fakes.await_stopped(1);
    Worker setting([&] { expect(refusal_of(**held, 4096) == Kind::none, "a run is said to be under way"); });
    setting.await_blocked();
    expect(!setting.done(), "a budget was set while figures were read");
    fakes.go_on();
  }
  fakes.holds_counters = false;
  expect((*held)->facts().budget_bytes == 4096, "no budget was set");
}

void what_holds_is_known_where_it_cannot_be_told() {
  SessionRequest request;
  request.group = "told";
  auto held = place("file", 0, request);
  fakes.refuses_summary = true;
  expect(refusal_of(**held, 4096) == Kind::core, "a failure went unnoticed");
  expect((*held)->facts().budget_bytes == 4096 && (*held)->facts().plan == 0, "the plan that is there is said to be another");
}

void sessions_are_shared_and_reclaimed() {
  int somebody = 0, another = 0;
  sessions().share("group", std::make_shared<ProgramSession>(&somebody, 3), {5, 1});
  sessions().share("group", std::make_shared<ProgramSession>(&another, 3), {0});
  auto shared = sessions().take_shared("group", 1);
  expect(shared && (*shared)->handle() == &somebody && shared->number() == 1, "another session was shared");
  expect((*shared)->device_index() == 3, "the device is another");
  expect((*sessions().take_shared("group", 0))->handle() == &another, "another session was shared");
  expect(!sessions().take_shared("group", 2) && sessions().is_shared("group"), "a place was shared that there is none of");
  sessions().share("anybody", std::make_shared<ProgramSession>(&somebody, 3), {});
  expect(sessions().take_shared("anybody", 7)->number() == 0, "what is for everybody was not shared");
  for (const char* group : {"group", "anybody"}) sessions().reclaim(group);
  expect(!sessions().take_shared("group", 1) && !sessions().is_shared("group"), "what was reclaimed was shared");
  shared.reset();
  expect(sessions().find("group").empty(), "a shared session is found as one of ours");
}

}  // namespace

const Core& core() {
  static const Core made = fake();
  return made;
}
void give_back_cached_memory() { fakes.changes += "give_back "; }
void throw_core_failure() { throw LoadError((Failure)core().failure(), core().failure_text()); }
PlanTable find_plan_table(const Payload& payload, const std::vector<int64_t>& methods, bool, const PackedWeights&) {
  for (const PlanTable& table : payload.plan_tables)
    if (table.methods == methods) return table;
  throw LoadError(Kind::package, "no plan table");
}
ReadyPlan ready(const StoredPlan& plan) { return {plan.device_bytes, {}, plan.slots}; }

}  // namespace penstock_executorch

int main() {
  using namespace penstock_executorch;
#ifdef WITH_MUTANTS
  if (const char* number = std::getenv("PENSTOCK_MUTANT")) penstock_mutant = std::atoi(number);
#endif
  alarm(60);  // what hangs has been noticed
  a_load_holds_up_nobody_else();
  who_shares_a_session_waits_for_its_load();
  no_budget_is_taken_twice();
  whoever_asks_a_session_is_waited_for();
  two_may_leave_at_once();
  a_load_that_fails_leaves_nothing();
  a_budget_is_set_between_runs();
  two_budgets_are_set_one_after_the_other();
  no_plan_is_said_to_be_there_that_may_not_be();
  whoever_keeps_memory_for_a_plan_gives_it_up();
  an_automatic_budget_is_set();
  who_only_asks_is_no_run();
  what_holds_is_known_where_it_cannot_be_told();
  sessions_are_shared_and_reclaimed();
  return 0;
}
