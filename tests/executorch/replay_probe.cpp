// replay_probe: a delegate's runs as CUDA graphs, over a core and compiled code that do nothing but write down what is asked
// of them. Ends with 0 when every play went right; PENSTOCK_MUTANT, in builds with mutants, switches one on.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "core.h"
#include "load_error.h"
#include "replays.h"

#ifdef WITH_MUTANTS
extern "C" int penstock_mutant;
#endif

namespace penstock_executorch {
namespace {

// In the order of the calls; what is refused, once, and how.
std::string calls, refused;
int32_t core_failure = 0;
int64_t next_graph = 100;
bool is_out_of_memory = false;

void expect(bool right, const std::string& what) {
  if (right) return;
  std::fprintf(stderr, "%s: %s\n", what.c_str(), calls.c_str());
  std::_Exit(1);
}

bool call(const std::string& name) {
  calls += name + " ";
  if (refused != name.substr(0, name.find(':'))) return true;
  refused.clear();
  return false;
}

int32_t status(const std::string& name) { return call(name) ? 0 : 1; }

std::string text(int64_t number) { return ":" + std::to_string(number); }

Core fake() {
  Core core{};
  core.failure = [] { return core_failure; };
  core.failure_text = [] { return "a test asked for this failure"; };
  core.session_failure = [](void*) { return core_failure; };
  core.session_failure_text = [](void*) { return "the core has this against it"; };
  core.session_abort = [](void*) { call("abort"); };
  core.session_drain = [](void*) { return status("drain"); };
  core.session_begin_capture = [](void*, int64_t method, void* stream) {
    expect(method == 3 && stream == (void*)7, "captured as another method, or on another stream");
    return status("begin_capture");
  };
  core.session_end_capture = [](void*, int64_t* graph) {
    *graph = next_graph++;
    return status("end_capture");
  };
  core.session_drop_capture = [](void*, int64_t graph) { return status("drop_capture" + text(graph)); };
  core.session_begin_replay = [](void*, int64_t graph, void* stream) {
    expect(stream == (void*)5, "replayed on another stream");
    return status("begin_replay" + text(graph));
  };
  core.session_launch = [](void*) { return status("launch"); };
  core.session_end_replay = [](void*) { return status("end_replay"); };
  return core;
}

void* const kStream = (void*)5;

// What a play sees of the calls since it last looked.
std::string done() {
  std::string found;
  found.swap(calls);
  return found;
}

struct Played {
  std::mutex running;
  PlanMemory plan_memory;
  CompiledCode code{"", 0, "", "", "cuda", 0};
  GraphMemory memory{0};
  Replays replays{nullptr, running, plan_memory, 3, code, memory, "forward"};
  ~Played() { core_failure = 0; }
  // As a session does before it installs another plan.
  void give_up() {
    for (const auto& [owner, give] : plan_memory) give();
  }
};

template <typename Action>
LoadError refusal(Action&& action) {
  try {
    action();
  } catch (const LoadError& error) {
    return error;
  }
  expect(false, "nothing was refused");
  std::abort();
}

const std::string kCapture = "give_back make:N pool begin_capture run:N end_capture end_pool ";

std::string captured(int64_t number) {
  std::string found = kCapture;
  for (size_t at; (at = found.find(":N")) != std::string::npos;) found.replace(at, 2, text(number));
  return found;
}

void a_shape_is_captured_once_and_replayed() {
  Played over;
  next_graph = 100;
  expect(!over.replays.replay({{1, 2}}, kStream) && done().empty(), "what was never captured was replayed");
  over.replays.capture({{1, 2}});
  expect(done() == captured(0), "captured otherwise");
  expect(!over.replays.replay({{2, 2}}, kStream) && done().empty(), "another shape was replayed");
  over.replays.capture({{2, 2}});
  done();
  expect(over.replays.replay({{1, 2}}, kStream), "not replayed");
  expect(done() == "begin_replay:100 fill:0 turn launch end_turn show:0 end_replay ", "replayed otherwise");
  expect(over.replays.replay({{2, 2}}, kStream) && done() == "begin_replay:101 fill:1 turn launch end_turn show:1 end_replay ",
         "the wrong one was replayed");
}

void what_was_used_least_is_given_up() {
  std::string last;
  {
    Played over;
    next_graph = 0;
    for (int64_t rows = 0; rows < 64; ++rows) over.replays.capture({{rows}});
    expect(over.replays.replay({{0}}, kStream), "the first is gone");
    done();
    over.replays.capture({{64}});
    expect(done() == "drain drop:1 drop_capture:1 " + captured(64), "another one was given up");
    expect(over.replays.replay({{0}}, kStream) && !over.replays.replay({{1}}, kStream), "another one was given up");
    core_failure = 1;
    const auto tried = [&] { over.replays.capture({{65}}); };
    refused = "drain";
    expect(refusal(tried).kind == Kind::core && over.replays.replay({{2}}, kStream), "one was given up that may be in use");
    refused = "drop_capture";
    done();
    expect(refusal(tried).kind == Kind::core && done() == "drain drop:3 drop_capture:3 ", "a failure went unnoticed");
    // Its memory has gone.
    expect(!over.replays.replay({{3}}, kStream), "a graph was replayed whose drop had failed");
    core_failure = 0;
    tried();
    expect(over.replays.replay({{65}}, kStream), "the next one was not captured");
    done();
  }
  last = done();
  expect(last.rfind("drain drop_capture:", 0) == 0 && last.find("drop_capture:64 ") != std::string::npos, "something is left");
}

void graphs_go_with_their_plan() {
  Played over;
  over.replays.capture({{1}});
  over.replays.capture({{2}});
  done();
  over.give_up();
  // The core drops its own.
  expect(done() == "drop:0 drop:1 ", "memory for graphs of a plan that goes is kept");
  expect(!over.replays.replay({{1}}, kStream) && done().empty(), "a graph of another plan was replayed");
  over.replays.capture({{1}});
  expect(done() == captured(2), "captured otherwise");
}

void nothing_is_given_back_that_is_gone() {
  done();
  { Played none; }
  expect(done().empty(), "nothing was waited for");
  PlanMemory* held = nullptr;
  {
    Played over;
    held = &over.plan_memory;
    expect(held->size() == 1, "its session does not know of it");
    over.replays.capture({{1}});
    over.give_up();
    done();
  }
  expect(done().empty(), "a graph that the core has dropped was dropped");
}

// Whether it has asked nothing before a run that is under way in another thread has ended.
template <typename Action>
void waits_for(std::mutex& running, Action&& action, const std::function<bool()>& is_done) {
  std::atomic<int> id{0};
  std::unique_lock<std::mutex> run(running);
  std::thread other([&] {
    id = (int)syscall(SYS_gettid);
    action();
  });
  // Asleep in the lock: what it could do it has done. Several times over, for it may sleep on its way. Or it has ended.
  for (int asleep = 0; asleep < 16;) {
    std::this_thread::yield();
    if (!id) continue;
    std::ifstream file("/proc/self/task/" + std::to_string(id) + "/syscall");
    std::string call;
    if (!(file >> call)) break;
    asleep = call == std::to_string(SYS_futex) ? asleep + 1 : 0;
  }
  expect(calls.empty() && !is_done(), "something was done during a run");
  run.unlock();
  other.join();
}

void a_delegate_comes_and_goes_between_runs() {
  std::mutex running;
  PlanMemory plan_memory;
  CompiledCode code{"", 0, "", "", "cuda", 0};
  GraphMemory memory{0};
  std::unique_ptr<Replays> replays;
  waits_for(running, [&] {
    replays = std::make_unique<Replays>(nullptr, running, plan_memory, 3, code, memory, "forward");
  }, [&] { return !plan_memory.empty(); });
  expect(plan_memory.size() == 1, "its session does not know of it");
  next_graph = 100;
  replays->capture({{1}});
  done();
  waits_for(running, [&] { replays.reset(); }, [&] { return plan_memory.empty(); });
  expect(done() == "drain drop_capture:100 drop:0 " && plan_memory.empty(), "something is left");
}

void a_replay_that_fails() {
  Played over;
  next_graph = 100;
  over.replays.capture({{1}});
  done();
  const auto replayed = [&] { over.replays.replay({{1}}, kStream); };
  core_failure = 1;
  refused = "begin_replay";
  expect(refusal(replayed).detail == 1 && done() == "begin_replay:100 ", "a run that did not begin was given up");
  refused = "launch";
  expect(refusal(replayed).kind == Kind::core && done() == "begin_replay:100 fill:0 turn launch end_turn abort ", "not given up");
  refused = "end_replay";
  expect(refusal(replayed).kind == Kind::core, "its end went unnoticed");
  done();
  core_failure = 0;
  refused = "fill";
  LoadError error = refusal(replayed);
  expect(error.kind == Kind::code && std::string(error.what()) == "method 'forward' failed inside its compiled code: torch",
         "told otherwise");
  expect(done() == "begin_replay:100 fill:0 abort ", "not given up");
  expect(over.replays.replay({{1}}, kStream), "it cannot be replayed any more");
}

void a_capture_that_fails() {
  Played over;
  const auto tried = [&] { over.replays.capture({{1}}); };
  const std::string said = "method 'forward' ran, but cannot be captured into a CUDA graph, because it does what a graph "
                           "cannot do again by itself, such as waiting for a value on the host; load it without "
                           "weight_offload_cuda_graph (";
  done();
  // Before anything is captured. What it has made it has not kept.
  refused = "make";
  expect(refusal(tried).kind == Kind::activations && done() == "give_back make:0 ", "no memory is told as another failure");
  int number = 1;
  for (const char* step : {"begin_capture", "run", "end_capture"})
    for (int32_t failure : {1, 2, 6}) {
      refused = step;
      core_failure = failure;
      const LoadError error = refusal(tried);
      // No memory, or a lost device: that is what there is to know.
      const bool is_plain = failure != 1;
      expect(error.kind == Kind::core && error.detail == (is_plain ? failure : 7), std::string(step) + " told as another");
      expect((std::string(error.what()).rfind(said, 0) == 0) != is_plain, std::string(step) + " told otherwise");
      const std::string found = done();
      expect(found.find("drop" + text(number)) != std::string::npos, std::string(step) + " left its memory");
      expect((found.find("abort") != std::string::npos) == (std::string(step) == "run"), std::string(step) + " given up");
      expect((found.find("pool") != std::string::npos) == (found.find("end_pool") != std::string::npos), "the pool is on");
      expect(!over.replays.replay({{1}}, kStream), "what was not captured was replayed");
      number++;
    }
  core_failure = 0;
  refused = "pool";
  expect(refusal(tried).detail == 7 && done() == "give_back make:10 pool drop:10 ", "told as another");
  // What torch says, and the core has nothing against; and what torch has no memory for.
  refused = "run";
  expect(refusal(tried).detail == 7, "told as another");
  is_out_of_memory = true;
  refused = "run";
  expect(refusal(tried).kind == Kind::activations, "no memory for activations is told as a capture that cannot be");
  is_out_of_memory = false;
  done();
  core_failure = 0;
  tried();
  expect(over.replays.replay({{1}}, kStream), "it cannot be captured any more");
}

}  // namespace

const Core& core() {
  static const Core made = fake();
  return made;
}
void give_back_cached_memory() { call("give_back"); }
void throw_core_failure() { throw LoadError((Failure)core().failure(), core().failure_text()); }
void give_run_up(void* session, const std::string& method, const std::exception& error) {
  core().session_abort(session);
  if (core_failure) throw LoadError((Failure)core_failure, core().session_failure_text(session));
  if (const auto* refusal = dynamic_cast<const LoadError*>(&error)) throw *refusal;
  throw LoadError(Kind::code, "method '" + method + "' failed inside its compiled code: " + error.what());
}

struct CompiledCode::Parts {};
CompiledCode::CompiledCode(const char*, size_t, const std::string&, const std::string&, const std::string&, int32_t) {}
CompiledCode::~CompiledCode() = default;
void note(const char* name, int64_t number) {
  if (call(name + text(number))) return;
  if (is_out_of_memory || std::string(name) == "make") throw LoadError(Kind::activations, "no memory");
  throw std::runtime_error("torch");
}
void CompiledCode::make_pass(int64_t number) { note("make", number); }
void CompiledCode::run_pass(int64_t number, void* stream) {
  expect(stream == (void*)7, "captured on another stream");
  note("run", number);
}
void CompiledCode::fill_pass(int64_t number) { note("fill", number); }
void CompiledCode::show_pass(int64_t number) { note("show", number); }
void CompiledCode::drop_pass(int64_t number) { note("drop", number); }

GraphMemory::GraphMemory(int32_t device_index) : device_index_(device_index) {}
GraphMemory::~GraphMemory() = default;
void GraphMemory::capture(const std::function<void(void* stream)>& action) {
  if (!call("pool")) throw std::runtime_error("torch");
  struct Ends {
    ~Ends() { call("end_pool"); }
  } ends;
  action((void*)7);
}
void GraphMemory::launch(const std::function<void()>& action) {
  call("turn");
  struct Ends {
    ~Ends() { call("end_turn"); }
  } ends;
  action();
}

}  // namespace penstock_executorch

int main() {
  using namespace penstock_executorch;
#ifdef WITH_MUTANTS
  if (const char* number = std::getenv("PENSTOCK_MUTANT")) penstock_mutant = std::atoi(number);
#endif
  alarm(60);
  a_shape_is_captured_once_and_replayed();
  what_was_used_least_is_given_up();
  graphs_go_with_their_plan();
  nothing_is_given_back_that_is_gone();
  a_delegate_comes_and_goes_between_runs();
  a_replay_that_fails();
  a_capture_that_fails();
  return 0;
}
