// run_model model.pte model.ptd BUDGET ROWS COLUMNS < input > output
//
// Runs `forward` on one float32 matrix that is read raw from standard input; writes the first output raw. BUDGET is a
// number of bytes, or "default": what was baked in, or else automatic.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
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

int main(int count, char** words) {
  if (count != 6) {
    std::fprintf(stderr, "usage: %s model.pte model.ptd BUDGET ROWS COLUMNS < input > output\n", words[0]);
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
  if (error == Error::Ok) error = map.set_options("PenstockBackend", options.view());
  if (error == Error::Ok) error = module.load(map);
  // Loading is lazy: what the delegate refuses, it refuses here.
  if (error == Error::Ok) error = module.load_method("forward");
  if (error != Error::Ok) {
    std::fprintf(stderr, "not loaded: error 0x%x\n", (unsigned)error);
    return 1;
  }

  auto result = module.forward(from_blob(input.data(), {rows, columns}));
  if (!result.ok()) {
    std::fprintf(stderr, "not run: error 0x%x\n", (unsigned)result.error());
    return 1;
  }
  auto output = result->at(0).toTensor();
  return std::fwrite(output.const_data_ptr(), 1, output.nbytes(), stdout) == output.nbytes() ? 0 : 1;
}
