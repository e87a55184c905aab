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
struct Sessions {
  std::mutex lock;
  std::condition_variable changed;
  int made = 0, open = 0, most = 0, stopped = 0;
  bool let_go = true;
  // Of the next calls of install, how many are refused, and how many there were.
  std::atomic<int> refused_installs{0}, installs{0};
  std::atomic<bool> is_below_floor{false};

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
} sessions;

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
  core.failure = [] { return sessions.is_below_floor.exchange(false) ? 12 : 1; };
  core.failure_text = [] { return "a test asked for this failure"; };
  core.load_torch = [] { return 0; };
  core.soft_create = [](size_t, size_t, int32_t) { return (void*)new int; };
  core.soft_error = [] { return ""; };
  core.driver_destroy = [](void* driver) { delete static_cast<int*>(driver); };
  core.driver_granularity = [](void*, int64_t* bytes) {
    *bytes = 4096;
    return 0;
  };
  core.budget_origin = [](int64_t given_bytes, int64_t, int64_t) {
    return int64_t{given_bytes >= 0 ? PENSTOCK_BUDGET_LOAD : PENSTOCK_BUDGET_BAKED};
  };
  core.format_bytes = [](int64_t) { return ""; };
  core.clamp_sentence = [](const PenstockBudget*) { return ""; };
  core.session_summary = [](void*, const PenstockSummary* asked) { return asked->name; };
  // As the core has it: what is more than all weights take is not used.
  core.choose_budget = [](PenstockBudget* budget) {
    budget->asked_bytes = budget->given_bytes >= 0 ? budget->given_bytes : budget->baked_bytes;
    budget->budget_bytes = std::min(budget->asked_bytes, budget->full_bytes);
    sessions.is_below_floor = budget->asked_bytes < budget->floor_bytes;
    return sessions.is_below_floor ? 1 : 0;
  };
  core.open = [](void*, const PenstockOpenRequest* asked) -> void* {
    std::string name = asked->path;
    if (name == "bad") return nullptr;
    {
      std::lock_guard<std::mutex> hold(sessions.lock);
      sessions.made++;
      sessions.most = std::max(sessions.most, ++sessions.open);
    }
    sessions.pass(name.rfind("held", 0) == 0);
    return new Session{name, {asked->extents, asked->extents + 2 * asked->extent_count}, asked->poison};
  };
  core.session_install = [](void* session, const int64_t*, int64_t) {
    sessions.installs++;
    if (sessions.refused_installs > 0 && sessions.refused_installs--) return 1;
    return static_cast<Session*>(session)->path == "bad plan" ? 1 : 0;
  };
  core.session_start_trace = [](void*) { return 0; };
  core.session_stop_trace = [](void*) { return 0; };
  core.session_spans = [](void*, int64_t*, int64_t) { return int64_t{0}; };
  core.session_destroy = [](void* session) {
    auto* made = static_cast<Session*>(session);
    sessions.pass(made->path.rfind("held", 0) == 0);
    delete made;
    std::lock_guard<std::mutex> hold(sessions.lock);
    sessions.open--;
  };
  return core;
}

Payload program(const std::string& name) {
  Payload payload{};
  payload.program = name;
  payload.device = "cpu";
  payload.page_bytes = 4096;
  payload.baked_bytes = 8192;
  payload.weights = {{"a", {"a"}, 6, {1024}, {0}, 4096}, {"none", {"none"}, 6, {0}, {0}, 0}};
  payload.methods = {{"one", {}, {}, 1, 100}, {"two", {}, {}, 1, 20}};
  payload.plan_tables = {{{0, 1}, {}, 4096, 8192, 0, {{4096, true, 0, 0}, {8192, true, 0, 0}}},
                         {{1}, {}, 2048, 8192, 0, {{2048, true, 0, 0}}}};
  return payload;
}

WeightsPlace at(const std::string& path) { return {path, 1, std::hash<std::string>()(path), 6000, {{0, 4096}, {4096, 1904}}, {}}; }

std::unique_ptr<SessionRef> session_ref(const std::string& path, int64_t method, const SessionRequest& request = {}) {
  return take_session_ref(program("program"), method, at(path), request, 0);
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
    // Asleep in a lock, or through: what it could do it has done.
    for (;;) {
      if (done_) return;
      if (!id_) continue;
      std::ifstream file("/proc/self/task/" + std::to_string(id_) + "/syscall");
      std::string call;
      if (file >> call && call == std::to_string(SYS_futex)) return;
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<int> id_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

void a_load_holds_up_nobody_else() {
  sessions.stop();
  std::unique_ptr<SessionRef> slow, other;
  Worker loading([&] { slow = session_ref("held", 0); });
  sessions.await_stopped(1);
  // Another file, what is lent, and a search: all of them while the load goes on.
  other = session_ref("other", 0);
  expect(find_session("") != nullptr, "the session beside the load is not found");
  expect(!take_shared_session_ref("nobody", 0), "a session_ref was lent by nobody");
  other.reset();
  expect(!loading.done(), "the load was not held");
  sessions.go_on();
}

void who_shares_a_session_waits_for_its_load() {
  int made = sessions.made;
  sessions.stop();
  std::unique_ptr<SessionRef> first, second;
  {
    Worker loading([&] { first = session_ref("held", 0); });
    sessions.await_stopped(1);
    Worker joining([&] { second = session_ref("held", 1); });
    joining.await_blocked();
    expect(!joining.done(), "a session_ref was had in a session that was not loaded");
    sessions.go_on();
  }
  expect(sessions.made == made + 1 && &first->session() == &second->session(), "two delegates made two sessions");
  expect(first->number() == 0 && second->number() == 1, "delegates are counted wrongly");
  // A place that is taken needs a session of its own; so does a delegate with its own budget.
  auto again = session_ref("held", 1);
  expect(&again->session() != &first->session(), "one place was given twice");
  SessionRequest request;
  request.own_budgets["two"].bytes = 8192;
  auto alone = session_ref("held", 1, request);
  expect(alone->number() == 0 && sessions.made == made + 3, "a delegate with a budget of its own shares");
  expect(alone->session().facts().floor_bytes == 2048, "a delegate that is alone has the plans of all");
  auto beside = session_ref("held", 0, request);
  expect(&beside->session() == &again->session(), "a free place was not used");
  second.reset();
  auto back = session_ref("held", 1);
  expect(&back->session() == &first->session(), "a place that was given back was not used");
}

void no_budget_is_taken_twice() {
  expect(sessions.open == 0, "sessions are left");
  sessions.most = 0;
  auto old = session_ref("held", 0);
  auto second = session_ref("held", 1);
  second.reset();
  expect(sessions.open == 1, "a session went before its last delegate");
  sessions.stop();
  std::unique_ptr<SessionRef> next, other;
  {
    Worker closing([&] { old.reset(); });
    sessions.await_stopped(1);
    // Giving up is as long as loading: nobody else waits for it, and whoever loads the same does.
    other = session_ref("other", 0);
    other.reset();
    sessions.most = 1;
    Worker loading([&] { next = session_ref("held", 0); });
    loading.await_blocked();
    expect(!loading.done() && sessions.open == 1, "a session was made while the one before it was given up");
    sessions.go_on();
  }
  expect(sessions.most == 1, "two sessions had the budget at once");
}

void a_load_that_fails_leaves_nothing() {
  for (const char* path : {"bad", "bad plan"})
    for (int time = 0; time < 2; ++time) {
      try {
        session_ref(path, 0);
        expect(false, "a failure of the core went unnoticed");
      } catch (const LoadError& refusal) {
        expect(refusal.kind == Kind::core, "the failure is told as another");
      }
    }
  expect(sessions.open == 0, "a failed load left a session");
}

Kind refusal_of(ProgramSession& session, int64_t budget_bytes) {
  try {
    session.set_budget(budget_bytes);
    return Kind::none;
  } catch (const LoadError& refusal) {
    return refusal.kind;
  }
}

void a_budget_is_set_between_runs() {
  SessionRequest request;
  request.group = "budgets";
  request.own_budgets["two"].bytes = 2048;
  auto shared = session_ref("file", 0, request), own = session_ref("file", 1, request);
  expect(find_sessions("budgets").size() == 2 && find_sessions("").empty(), "a group has the sessions of another");
  expect(shared->session().own_delegate().empty(), "a session that is shared has one delegate's name");
  expect(own->session().own_delegate() == "two", "a delegate's own session has another name");
  ProgramSession& session = shared->session();
  const auto is_at = [&](int64_t budget_bytes, int64_t plan) {
    const SessionFacts facts = session.facts();
    return facts.budget_bytes == budget_bytes && facts.plan == plan && facts.plan_bytes == 4096 * (plan + 1);
  };
  expect(is_at(8192, 1), "the budget at load is another");
  {
    std::lock_guard<std::mutex> run(session.running());
    Worker setting([&] { expect(refusal_of(session, 4096) == Kind::busy, "a budget was set during a run"); });
  }
  session.start_trace();
  expect(session.is_tracing() && refusal_of(session, 4096) == Kind::busy, "a budget was set under a trace");
  expect(session.stop_trace().empty() && !session.is_tracing(), "a trace goes on");
  {
    std::lock_guard<std::mutex> run(session.running());
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
  int installs = sessions.installs;
  expect(refusal_of(session, 5000) == Kind::none && is_at(5000, 0), "the smaller plan was not taken");
  expect(refusal_of(session, 6000) == Kind::none && is_at(6000, 0), "another budget changed the plan");
  expect(sessions.installs == installs + 1, "a plan was installed that was there");
  sessions.refused_installs = 1;
  expect(refusal_of(session, 9000) == Kind::core && is_at(6000, 0), "a plan that the core refused was taken");
  expect(sessions.installs == installs + 3, "the old plan was not put back");
  sessions.refused_installs = 2;
  expect(refusal_of(session, 9000) == Kind::core, "nothing was said of a session without a plan");
  installs = sessions.installs;
  expect(refusal_of(session, 6000) == Kind::none && sessions.installs == installs + 1, "no plan was put in the place of none");
  expect(refusal_of(session, 9000) == Kind::none && is_at(8192, 1), "more than everything was not taken for everything");
}

void sessions_are_lent_and_reclaimed() {
  int somebody = 0;
  lend_session("group", &somebody, 3, {1});
  auto lent = take_shared_session_ref("group", 1);
  expect(lent && lent->session().handle() == &somebody && lent->number() == 0, "another session was lent");
  expect(lent->session().device_index() == 3, "the device is another");
  try {
    take_shared_session_ref("group", 0);
    expect(false, "a session_ref was lent that there is none of");
  } catch (const LoadError& refusal) {
    expect(refusal.kind == Kind::package, "the refusal is told as another");
  }
  reclaim_sessions("group");
  expect(!take_shared_session_ref("group", 1), "what was reclaimed was lent");
  lent.reset();
  expect(!find_session("group"), "a lent session is found as one of ours");
}

}  // namespace

const Core& core() {
  static const Core made = fake();
  return made;
}
void give_back_cached_memory() {}
void throw_core_failure() { throw LoadError(Kind::core, core().failure_text(), core().failure()); }
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
  a_load_that_fails_leaves_nothing();
  a_budget_is_set_between_runs();
  sessions_are_lent_and_reclaimed();
  return 0;
}
