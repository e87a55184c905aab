// run_model model.pte model.ptd BUDGET ROWS COLUMNS [--runs N] [--set-budget BYTES]... [--cuda-graph] [--calibrate]
//           < input > output
//
// Runs `forward` on one float32 matrix that is read raw from standard input; writes the first output raw. BUDGET is a
// number of bytes, or "default": what was baked in, or else automatic. After each --set-budget it runs again with
// that budget, without loading anything again. --runs: so many times with each budget, once if nothing is said; the last
// output is written. What the last run moved, and how long the runs took, is printed to standard error. --cuda-graph: runs
// are captured, and replayed as CUDA graphs. --calibrate: then as many runs are traced, whose output nobody sees, and it is
// printed how long each step takes once its weights are there, and what copies of each size reach.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "penstock_executorch.h"

using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::BackendOption;
using executorch::runtime::BackendOptions;
using executorch::runtime::Error;
using executorch::runtime::LoadBackendOptionsMap;

constexpr const char* kBackend = "PenstockBackend";

struct Work {
  Module& module;
  std::vector<float>& input;
  int rows;
  int columns;
  int runs;
  bool is_shown;
};

// The time that a run took, in the median; negative where one failed. What it returns lies in main memory, so it is over.
int64_t run(const Work& work) {
  std::vector<int64_t> took_ns;
  for (int i = 1; i <= work.runs; ++i) {
    const auto began = std::chrono::steady_clock::now();
    auto result = work.module.forward(from_blob(work.input.data(), {work.rows, work.columns}));
    took_ns.push_back(std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count());
    if (!result.ok()) {
      std::fprintf(stderr, "not run: error 0x%x\n", (unsigned)result.error());
      return -1;
    }
    if (i < work.runs || !work.is_shown) continue;
    auto output = result->at(0).toTensor();
    if (std::fwrite(output.const_data_ptr(), 1, output.nbytes(), stdout) != output.nbytes()) return -1;
  }
  std::nth_element(took_ns.begin(), took_ns.begin() + work.runs / 2, took_ns.end());
  return took_ns[(size_t)work.runs / 2];
}

bool set_budget(const char* budget) {
  BackendOptions<1> options;
  Error error = options.set_option("weight_offload_budget", budget);
  if (error == Error::Ok) error = executorch::runtime::set_option(kBackend, options.view());
  if (error != Error::Ok) std::fprintf(stderr, "budget not set: error 0x%x\n", (unsigned)error);
  return error == Error::Ok;
}

constexpr const char* kFigures[] = {
    "weight_offload_budget", "weight_offload_plan", "weight_offload_plan_count", "weight_offload_device_bytes",
    "weight_offload_peak_device_bytes", "weight_offload_runs", "weight_offload_replays", "weight_offload_last_run_bytes_streamed",
    "weight_offload_last_run_bytes_hit", "weight_offload_last_run_bytes_in_place", "weight_offload_last_run_bytes_decoded",
    "weight_offload_last_run_copies", "weight_offload_last_run_stall_ns", "weight_offload_last_run_expert_hits",
    "weight_offload_last_run_expert_misses", "weight_offload_last_run_expert_bytes", "weight_offload_link_bytes_per_s"};
using Text = std::array<char, executorch::runtime::kMaxOptionValueLength>;

// Every figure is a decimal number in a string: an int of ExecuTorch's has 32 bits.
bool print_figures(int64_t run_ns) {
  std::vector<BackendOption> options;
  for (const char* name : kFigures) {
    BackendOption option{};
    std::strncpy(option.key, name, sizeof option.key - 1);
    option.value = Text{};
    options.push_back(option);
  }
  Error error = executorch::runtime::get_option(kBackend, {options.data(), options.size()});
  if (error != Error::Ok) {
    std::fprintf(stderr, "no figures: error 0x%x\n", (unsigned)error);
    return false;
  }
  std::map<std::string, double> found;
  for (const BackendOption& option : options) {
    const char* text = std::get<Text>(option.value).data();
    std::fprintf(stderr, "%s=%s\n", option.key, text);
    found[option.key] = std::atof(text);
  }
  std::fprintf(stderr, "run_ns=%lld\n", (long long)run_ns);
  const double streamed_bytes = found["weight_offload_last_run_bytes_streamed"];
  const double link_bytes_per_s = found["weight_offload_link_bytes_per_s"];
  std::fprintf(stderr, "%.3f ms a run", (double)run_ns / 1e6);
  // The link as it was timed when the plan was installed, with copies as the plan makes them.
  if (streamed_bytes > 0 && link_bytes_per_s > 0)
    std::fprintf(stderr, ", %.3f GB/s over a link of %.3f GB/s: %.0f%%", streamed_bytes / (double)run_ns,
                 link_bytes_per_s / 1e9, 100e9 * streamed_bytes / (double)run_ns / link_bytes_per_s);
  std::fprintf(stderr, "\n");
  return true;
}

bool run_and_print(const Work& work) {
  const int64_t run_ns = run(work);
  return run_ns >= 0 && print_figures(run_ns);
}

// By step, what each run took for it.
using Steps = std::map<int64_t, std::vector<int64_t>>;

void take_step(const PenstockSpan* span, void* steps) {
  if (span->lane == 0) (*static_cast<Steps*>(steps))[span->index].push_back(span->end_ns - span->begin_ns);
}

void print_link(const PenstockLinkSample* sample, void*) {
  std::fprintf(stderr, "link: copies of %lld bytes at %.3f GB/s\n", (long long)(sample->bytes / sample->copies),
               sample->ns ? (double)sample->bytes / (double)sample->ns : 0.0);
}

bool refused() {
  std::fprintf(stderr, "not calibrated: %s\n", penstock_executorch_text());
  return false;
}

// More runs, with a trace of them.
bool calibrate(const Work& work) {
  Steps steps;
  if (penstock_executorch_start_trace("", "")) return refused();
  const bool ran = run({work.module, work.input, work.rows, work.columns, work.runs, false}) >= 0;
  // Also behind a run that failed: while a trace is on, no other budget can be set.
  if (penstock_executorch_stop_trace("", "", take_step, &steps)) return refused();
  if (!ran) return false;
  if (penstock_executorch_link("", "", print_link, nullptr)) return refused();
  int64_t sum_ns = 0;
  for (auto& [step, took_ns] : steps) {
    std::nth_element(took_ns.begin(), took_ns.begin() + (long)took_ns.size() / 2, took_ns.end());
    std::fprintf(stderr, "step %lld: %lld ns\n", (long long)step, (long long)took_ns[took_ns.size() / 2]);
    sum_ns += took_ns[took_ns.size() / 2];
  }
  std::fprintf(stderr, "%zu steps: %.3f ms\n", steps.size(), (double)sum_ns / 1e6);
  return true;
}

int main(int count, char** words) {
  bool understood = count >= 6, cuda_graph = false, is_calibrating = false;
  int runs = 1;
  std::vector<const char*> budgets;
  for (int i = 6; understood && i < count; ++i) {
    const bool has_value = i + 1 < count;
    if (std::strcmp(words[i], "--set-budget") == 0 && has_value) budgets.push_back(words[++i]);
    else if (std::strcmp(words[i], "--runs") == 0 && has_value) runs = std::atoi(words[++i]);
    else if (std::strcmp(words[i], "--cuda-graph") == 0) cuda_graph = true;
    else if (std::strcmp(words[i], "--calibrate") == 0) is_calibrating = true;
    else understood = false;
  }
  if (!understood || runs < 1) {
    std::fprintf(stderr,
                 "usage: %s model.pte model.ptd BUDGET ROWS COLUMNS [--runs N] [--set-budget BYTES]... [--cuda-graph] "
                 "[--calibrate] < input > output\n",
                 words[0]);
    return 2;
  }
  int rows = std::atoi(words[4]), columns = std::atoi(words[5]);
  std::vector<float> input((size_t)rows * (size_t)columns);
  if (std::fread(input.data(), sizeof(float), input.size(), stdin) != input.size()) {
    std::fprintf(stderr, "standard input has less than %zu floats\n", input.size());
    return 2;
  }

  // Mapped: weights are streamed from the file. The default mode reads it into memory, which the delegate refuses.
  Module module(words[1], std::string(words[2]), Module::LoadMode::Mmap);
  BackendOptions<2> options;
  Error error = Error::Ok;
  if (std::strcmp(words[3], "default") != 0) error = options.set_option("weight_offload_budget", words[3]);
  if (error == Error::Ok && cuda_graph) error = options.set_option("weight_offload_cuda_graph", true);
  LoadBackendOptionsMap map;
  if (error == Error::Ok) error = map.set_options(kBackend, options.view());
  if (error == Error::Ok) error = module.load(map);
  // Loading is lazy: what the delegate refuses, it refuses here.
  if (error == Error::Ok) error = module.load_method("forward");
  if (error != Error::Ok) {
    std::fprintf(stderr, "not loaded: error 0x%x\n", (unsigned)error);
    return 1;
  }

  const Work work{module, input, rows, columns, runs, true};
  if (!run_and_print(work)) return 1;
  for (const char* budget : budgets)
    if (!set_budget(budget) || !run_and_print(work)) return 1;
  return is_calibrating && !calibrate(work) ? 1 : 0;
}
