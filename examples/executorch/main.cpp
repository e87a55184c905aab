// run_model model.pte model.ptd BUDGET ROWS COLUMNS [--set-budget BYTES]... < input > output
//
// Runs `forward` on one float32 matrix that is read raw from standard input; writes the first output raw. BUDGET is a
// number of bytes, or "default": what was baked in, or else automatic. After each --set-budget it runs once more with
// that budget, without loading anything again. What each run moved is printed to standard error.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::BackendOptions;
using executorch::runtime::Error;
using executorch::runtime::LoadBackendOptionsMap;

constexpr const char* kBackend = "PenstockBackend";

bool run(Module& module, std::vector<float>& input, int rows, int columns) {
  auto result = module.forward(from_blob(input.data(), {rows, columns}));
  if (!result.ok()) {
    std::fprintf(stderr, "not run: error 0x%x\n", (unsigned)result.error());
    return false;
  }
  auto output = result->at(0).toTensor();
  return std::fwrite(output.const_data_ptr(), 1, output.nbytes(), stdout) == output.nbytes();
}

bool set_budget(const char* budget) {
  BackendOptions<1> options;
  Error error = options.set_option("weight_offload_budget", budget);
  if (error == Error::Ok) error = executorch::runtime::set_option(kBackend, options.view());
  if (error != Error::Ok) std::fprintf(stderr, "budget not set: error 0x%x\n", (unsigned)error);
  return error == Error::Ok;
}

// Every figure is a decimal number in a string: an int of ExecuTorch's has 32 bits.
bool print_figures() {
  BackendOptions<6> options;
  bool fits = options.set_option("weight_offload_budget", "") == Error::Ok &&
              options.set_option("weight_offload_device_bytes", "") == Error::Ok &&
              options.set_option("weight_offload_runs", "") == Error::Ok &&
              options.set_option("weight_offload_last_run_bytes_streamed", "") == Error::Ok &&
              options.set_option("weight_offload_last_run_copies", "") == Error::Ok &&
              options.set_option("weight_offload_link_bytes_per_s", "") == Error::Ok;
  Error error = fits ? executorch::runtime::get_option(kBackend, options.view()) : Error::InvalidArgument;
  if (error != Error::Ok) {
    std::fprintf(stderr, "no figures: error 0x%x\n", (unsigned)error);
    return false;
  }
  for (const auto& option : options.view())
    if (auto* text = std::get_if<std::array<char, executorch::runtime::kMaxOptionValueLength>>(&option.value))
      std::fprintf(stderr, "%s=%s\n", option.key, text->data());
  return true;
}

int main(int count, char** words) {
  bool understood = count >= 6 && count % 2 == 0;
  for (int i = 6; i < count; i += 2) understood = understood && std::strcmp(words[i], "--set-budget") == 0;
  if (!understood) {
    std::fprintf(stderr, "usage: %s model.pte model.ptd BUDGET ROWS COLUMNS [--set-budget BYTES]... < input > output\n",
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
  LoadBackendOptionsMap map;
  if (error == Error::Ok) error = map.set_options(kBackend, options.view());
  if (error == Error::Ok) error = module.load(map);
  // Loading is lazy: what the delegate refuses, it refuses here.
  if (error == Error::Ok) error = module.load_method("forward");
  if (error != Error::Ok) {
    std::fprintf(stderr, "not loaded: error 0x%x\n", (unsigned)error);
    return 1;
  }

  if (!run(module, input, rows, columns) || !print_figures()) return 1;
  for (int i = 6; i < count; i += 2)
    if (!set_budget(words[i + 1]) || !run(module, input, rows, columns) || !print_figures()) return 1;
  return 0;
}
