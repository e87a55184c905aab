// replay_probe: a delegate's runs as CUDA graphs, over a core and compiled code that do nothing but write down what is asked
// of them. Ends with 0 when every play went right; PENSTOCK_MUTANT, in builds with mutants, switches one on.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

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
  std::atomic<int64_t> plan{0};
  CompiledCode code{"", 0, "", "", "cuda", 0};
  GraphMemory memory{0};
  Replays replays{nullptr, plan, 3, code, memory, "forward"};
  ~Played() { core_failure = 0; }
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
  expect(done() == "begin_replay:100 fill:0 launch show:0 end_replay ", "replayed otherwise");
  expect(over.replays.replay({{2, 2}}, kStream) && done() == "begin_replay:101 fill:1 launch show:1 end_replay ",
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
    for (const char* step : {"drain", "drop_capture"}) {
      refused = step;
      core_failure = 1;
      expect(refusal([&] { over.replays.capture({{65}}); }).kind == Kind::core, "a failure went unnoticed");
    }
    done();
  }
  last = done();
  expect(last.rfind("drain drop:", 0) == 0 && last.find("drop_capture:64 ") != std::string::npos, "something is left");
}

void graphs_go_with_their_plan() {
  Played over;
  over.replays.capture({{1}});
  done();
  over.plan++;
  expect(!over.replays.replay({{1}}, kStream) && done() == "drop:0 ", "a graph of another plan was replayed");
  over.replays.capture({{1}});
  done();
  over.plan++;
  over.replays.capture({{2}});
  // The core has dropped its own.
  expect(done() == "drop:1 " + captured(2), "a graph of another plan is kept");
  over.plan++;
}

void nothing_is_given_back_that_is_gone() {
  done();
  { Played none; }
  expect(done().empty(), "nothing was waited for");
  {
    Played over;
    over.replays.capture({{1}});
    over.plan++;
    done();
  }
  expect(done() == "drain drop:0 ", "a graph that the core has dropped was dropped");
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
  expect(refusal(replayed).kind == Kind::core && done() == "begin_replay:100 fill:0 launch abort ", "not given up");
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
  int number = 0;
  for (const char* step : {"make", "begin_capture", "run", "end_capture"})
    for (int32_t failure : {1, 2, 6}) {
      const bool is_of_core = std::string(step) != "make";
      refused = step;
      core_failure = is_of_core ? failure : 0;
      const LoadError error = refusal(tried);
      // No memory, or a lost device: that is what there is to know.
      const bool is_plain = is_of_core && failure != 1;
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
  tried();
  expect(over.replays.replay({{1}}, kStream), "it cannot be captured any more");
}

}  // namespace

const Core& core() {
  static const Core made = fake();
  return made;
}
void give_back_cached_memory() { call("give_back"); }
void throw_core_failure() { throw LoadError(Kind::core, core().failure_text(), core().failure()); }
void give_run_up(void* session, const std::string& method, const std::exception& error) {
  core().session_abort(session);
  if (core_failure) throw LoadError(Kind::core, core().session_failure_text(session), core_failure);
  throw LoadError(Kind::code, "method '" + method + "' failed inside its compiled code: " + error.what());
}

struct CompiledCode::Parts {};
CompiledCode::CompiledCode(const char*, size_t, const std::string&, const std::string&, const std::string&, int32_t) {}
CompiledCode::~CompiledCode() = default;
void note(const char* name, int64_t number) {
  if (!call(name + text(number))) throw std::runtime_error("torch");
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
  call("pool");
  struct Ends {
    ~Ends() { call("end_pool"); }
  } ends;
  action((void*)7);
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
  a_replay_that_fails();
  a_capture_that_fails();
  return 0;
}
