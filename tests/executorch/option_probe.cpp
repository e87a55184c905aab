// option_probe model.pte model.ptd MODE ROWS [TYPE KEY VALUE]...
// Loads `forward` with options of any kind (int, text, bool) and runs it on ones(ROWS, 96) in two threads; prints the
// error's number, 0 when all went well.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using executorch::extension::Module;
using executorch::runtime::BackendOption;
using executorch::runtime::Error;

int main(int count, char** words) {
  std::vector<BackendOption> options;
  for (int i = 5; i + 2 < count; i += 3) {
    BackendOption option;
    std::strncpy(option.key, words[i + 1], sizeof option.key - 1);
    std::string type = words[i];
    if (type == "int") option.value = std::stoi(words[i + 2]);
    if (type == "bool") option.value = std::string(words[i + 2]) == "true";
    if (type == "text") {
      std::array<char, executorch::runtime::kMaxOptionValueLength> text{};
      std::strncpy(text.data(), words[i + 2], text.size() - 1);
      option.value = text;
    }
    options.push_back(option);
  }
  executorch::runtime::LoadBackendOptionsMap map;
  Error error = map.set_options("PenstockBackend", {options.data(), options.size()});
  int rows = std::stoi(words[4]);
  auto mode = std::string(words[3]) == "file" ? Module::LoadMode::File : Module::LoadMode::Mmap;
  std::vector<std::unique_ptr<Module>> modules;
  for (int i = 0; i < 2 && error == Error::Ok; ++i) {
    modules.push_back(std::make_unique<Module>(words[1], std::string(words[2]), mode));
    error = modules.back()->load(map);
    if (error == Error::Ok) error = modules.back()->load_method("forward");
  }
  std::vector<Error> found(modules.size(), error);
  std::vector<std::vector<float>> results(modules.size());
  if (error == Error::Ok) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < modules.size(); ++i)
      threads.emplace_back([&, i] {
        for (int run = 0; run < 50 && found[i] == Error::Ok; ++run) {
          std::vector<float> ones((size_t)rows * 96, 1.0f);
          auto result = modules[i]->forward(executorch::extension::from_blob(ones.data(), {rows, 96}));
          found[i] = result.error();
          if (!result.ok()) break;
          auto output = result->at(0).toTensor();
          const float* start = output.const_data_ptr<float>();
          std::vector<float> values(start, start + output.numel());
          if (run && values != results[i]) found[i] = Error::Internal;
          results[i] = values;
        }
      });
    for (auto& thread : threads) thread.join();
  }
  for (Error each : found)
    if (each != Error::Ok) error = each;
  if (error == Error::Ok && results[0] != results[1]) error = Error::Internal;
  std::printf("%d\n", (int)error);
}
