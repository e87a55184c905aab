// behaviour_probe: a program in C++ that is told what to do, a line at a time, and answers each with a line.
//
//   open PTE PTD [OPTION BUDGET]...
//   run METHOD ROWS COLUMNS DTYPE HEX
//   read NAME BYTES | write NAME HEX | reset
//   set OPTION BUDGET          of the loaded program
//   figure NAME                what get_option has under it, in decimal digits
//   close
//
// Answers: "ok [HEX or digits]", or "refused STATUS KIND DETAIL TEXT" with what the delegate says of it.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "penstock_executorch.h"

extern "C" int32_t penstock_executorch_kind();
extern "C" int64_t penstock_executorch_detail();

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::BackendOption;
using executorch::runtime::BackendOptions;
using executorch::runtime::Error;

namespace {

std::vector<char> bytes_of(const std::string& hex) {
  std::vector<char> bytes;
  for (size_t at = 0; at + 1 < hex.size(); at += 2) bytes.push_back((char)std::stoi(hex.substr(at, 2), nullptr, 16));
  return bytes;
}

std::string hex_of(const void* start, size_t bytes) {
  const char* digits = "0123456789abcdef";
  std::string hex;
  for (const auto* at = static_cast<const unsigned char*>(start); bytes; --bytes, ++at) {
    hex += digits[*at >> 4];
    hex += digits[*at & 15];
  }
  return hex;
}

void answer(int32_t status, const std::string& hex = "") {
  if (status == 0)
    std::cout << "ok " << hex << std::endl;
  else
    std::cout << "refused " << status << ' ' << penstock_executorch_kind() << ' ' << penstock_executorch_detail() << ' '
              << penstock_executorch_text() << std::endl;
}

BackendOption option_of(const std::string& key, const std::string& value) {
  BackendOption option{};
  std::strncpy(option.key, key.c_str(), sizeof option.key - 1);
  // An int in MiB; the others are text.
  if (key.rfind("weight_offload_budget_mb", 0) == 0) {
    option.value = std::stoi(value);
  } else {
    std::array<char, executorch::runtime::kMaxOptionValueLength> text{};
    std::strncpy(text.data(), value.c_str(), text.size() - 1);
    option.value = text;
  }
  return option;
}

std::unique_ptr<Module> opened(std::istream& words) {
  std::string program, weights, key, budget;
  words >> program >> weights;
  std::vector<BackendOption> options;
  while (words >> key >> budget) options.push_back(option_of(key, budget));
  // Arenas are shared: state that is left to ExecuTorch is one for all methods.
  auto module = std::make_unique<Module>(program, weights, Module::LoadMode::Mmap, nullptr, nullptr, nullptr, true);
  executorch::runtime::LoadBackendOptionsMap map;
  Error error = map.set_options("PenstockBackend", {options.data(), options.size()});
  if (error == Error::Ok) error = module->load(map);
  if (error == Error::Ok) {
    auto names = module->method_names();
    error = names.error();
    if (names.ok())
      for (const std::string& name : *names)
        if (error == Error::Ok) error = module->load_method(name);
  }
  answer((int32_t)error);
  return error == Error::Ok ? std::move(module) : nullptr;
}

void run(Module& module, std::istream& words) {
  std::string method, dtype, hex;
  int rows, columns;
  words >> method >> rows >> columns >> dtype >> hex;
  std::vector<char> input = bytes_of(hex);
  auto result = module.execute(
      method, from_blob(input.data(), {rows, columns}, dtype == "float32" ? ScalarType::Float : ScalarType::Double));
  if (!result.ok()) return answer((int32_t)result.error());
  auto output = result->at(0).toTensor();
  answer(0, hex_of(output.const_data_ptr(), output.nbytes()));
}

void set_budget(std::istream& words) {
  std::string key, budget;
  words >> key >> budget;
  BackendOption option = option_of(key, budget);
  answer((int32_t)executorch::runtime::set_option("PenstockBackend", {&option, 1}));
}

void get_figure(std::istream& words) {
  std::string name;
  words >> name;
  BackendOptions<1> options;
  char key[executorch::runtime::kMaxOptionKeyLength]{};
  std::snprintf(key, sizeof key, "weight_offload_%s", name.c_str());
  Error error = options.set_option(key, "");
  if (error == Error::Ok) error = executorch::runtime::get_option("PenstockBackend", options.view());
  std::string digits;
  if (error == Error::Ok)
    digits = std::get<std::array<char, executorch::runtime::kMaxOptionValueLength>>(options.view()[0].value).data();
  answer((int32_t)error, digits);
}

}  // namespace

int main() {
  std::unique_ptr<Module> module;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command, name, hex;
    words >> command;
    if (command == "open") {
      module = opened(words);
    } else if (command == "run") {
      run(*module, words);
    } else if (command == "read") {
      int64_t bytes = 0;
      words >> name >> bytes;
      std::vector<char> found((size_t)bytes);
      int32_t status = penstock_executorch_read_state("", name.c_str(), found.data(), bytes);
      answer(status, hex_of(found.data(), found.size()));
    } else if (command == "write") {
      words >> name >> hex;
      std::vector<char> given = bytes_of(hex);
      answer(penstock_executorch_write_state("", name.c_str(), given.data(), (int64_t)given.size()));
    } else if (command == "reset") {
      answer(penstock_executorch_reset_state(""));
    } else if (command == "set") {
      set_budget(words);
    } else if (command == "figure") {
      get_figure(words);
    } else {
      module.reset();
      answer(0);
    }
  }
}
