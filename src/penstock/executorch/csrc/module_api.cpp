// ExecuTorch's C++ Module over a C interface, for Python: unlike ExecuTorch's own Python bindings, it takes options at
// load. Functions return ExecuTorch's error number; penstock_executorch_kind, _detail and _text then say more.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <cstring>
#include <exception>

#include "error_code.h"
#include "payload.h"
#include "program_session.h"
#include "load_error.h"
#include "penstock_executorch.h"
#include "state_table.h"

namespace {

using executorch::aten::ScalarType;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::BackendOption;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::LoadBackendOptionsMap;
using executorch::runtime::Span;
using penstock_executorch::Kind;
using penstock_executorch::ProgramSession;
using penstock_executorch::StateTable;
using penstock_executorch::TensorView;
using penstock_executorch::last_refusal;

constexpr const char* kBackend = "PenstockBackend";

// src/penstock/executorch/native.py has the same.
struct Value {
  int32_t kind;  // 0: none, 1: tensor, 2: int, 3: float, 4: bool
  int32_t scalar_type;
  int64_t rank;
  const int64_t* sizes;
  const int64_t* strides;
  void* data;
  int64_t integer;
  double number;
};

// Gives access to loaded methods, for the state inside them.
class OpenModule : public Module {
 public:
  using Module::Module;
  executorch::runtime::Method& loaded(const std::string& name) { return *methods_.at(name).method; }
};

struct Loaded {
  std::unique_ptr<OpenModule> module;
};

constexpr const char* kPayload = "penstock.program.";

template <typename Action>
int32_t to_status(Action&& action) noexcept {
  last_refusal() = {};
  try {
    return (int32_t)action();
  } catch (...) {
    return (int32_t)penstock_executorch::code_of(penstock_executorch::keep_refusal());
  }
}

BackendOption text_option(const char* key, const std::string& value) {
  BackendOption option;
  std::strncpy(option.key, key, sizeof option.key - 1);
  std::array<char, executorch::runtime::kMaxOptionValueLength> text{};
  if (value.size() + 1 >= text.size())
    throw penstock_executorch::LoadError(Kind::option, std::string("option ") + key + " is longer than 254 characters");
  std::memcpy(text.data(), value.data(), value.size());
  option.value = text;
  return option;
}

OpenModule& module_of(void* handle) { return *static_cast<Loaded*>(handle)->module; }

EValue value_of(const Value& value, std::vector<TensorPtr>& tensors) {
  switch (value.kind) {
    case 1: {
      std::vector<executorch::aten::SizesType> sizes(value.sizes, value.sizes + value.rank);
      std::vector<executorch::aten::StridesType> strides(value.strides, value.strides + value.rank);
      tensors.push_back(executorch::extension::make_tensor_ptr(std::move(sizes), value.data, {}, std::move(strides),
                                                               static_cast<ScalarType>(value.scalar_type)));
      return EValue(*tensors.back());
    }
    case 2:
      return EValue(value.integer);
    case 3:
      return EValue(value.number);
    case 4:
      return EValue(value.integer != 0);
    default:
      return EValue();
  }
}

// Each of the core's records is a fixed count of numbers.
template <typename Record>
void show_records(const std::vector<int64_t>& numbers, void (*visit)(const Record*, void*), void* context) {
  constexpr size_t kNumbers = sizeof(Record) / sizeof(int64_t);
  for (size_t at = 0; at + kNumbers <= numbers.size(); at += kNumbers) {
    Record record;
    std::memcpy(&record, &numbers[at], sizeof record);
    visit(&record, context);
  }
}

void show_tensor(const executorch::aten::Tensor& tensor, void (*visit)(const Value*)) {
  std::vector<int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
  std::vector<int64_t> strides(tensor.strides().begin(), tensor.strides().end());
  Value value{1, (int32_t)tensor.scalar_type(), (int64_t)sizes.size(), sizes.data(), strides.data(),
              tensor.mutable_data_ptr(), 0, 0};
  visit(&value);
}

void show(const EValue& found, void (*visit)(const Value*)) {
  if (found.isTensor()) return show_tensor(found.toTensor(), visit);
  Value value{};
  if (found.isInt()) {
    value.kind = 2;
    value.integer = found.toInt();
  } else if (found.isDouble()) {
    value.kind = 3;
    value.number = found.toDouble();
  } else if (found.isBool()) {
    value.kind = 4;
    value.integer = found.toBool();
  } else if (found.isString()) {
    auto view = found.toString();
    value.kind = 5;
    value.data = const_cast<char*>(view.data());
    value.integer = (int64_t)view.size();
  } else if (!found.isNone()) {
    throw penstock_executorch::LoadError(Kind::package, "a method returned something other than tensors and numbers");
  }
  visit(&value);
}

}  // namespace

extern "C" {

int32_t penstock_executorch_kind() { return (int32_t)last_refusal().kind; }
int64_t penstock_executorch_detail() { return last_refusal().detail; }
const char* penstock_executorch_text() { return last_refusal().text.c_str(); }

// `budget` is a decimal number, "auto", or null. Methods are loaded one by one later: until then only the file itself
// can be refused.
int32_t penstock_executorch_open(const char* program, const char* const* data_files, int64_t data_count,
                                 const char* budget, const char* group, void** out) {
  return to_status([&] {
    auto loaded = std::make_unique<Loaded>();
    // Mapped, because weights are streamed from the file; shared arenas, because methods share state.
    loaded->module = std::make_unique<OpenModule>(std::string(program),
                                                  std::vector<std::string>(data_files, data_files + data_count),
                                                  Module::LoadMode::Mmap, nullptr, nullptr, nullptr, true);
    std::vector<BackendOption> options{text_option("weight_offload_group", group)};
    if (budget) options.push_back(text_option("weight_offload_budget", budget));
    // Python logs it in its own words, or is asked not to.
    BackendOption quiet;
    std::strncpy(quiet.key, "weight_offload_quiet", sizeof quiet.key - 1);
    quiet.value = true;
    options.push_back(quiet);
    LoadBackendOptionsMap map;
    Error error = map.set_options(kBackend, Span<BackendOption>(options.data(), options.size()));
    if (error == Error::Ok)
      error = loaded->module->load(map, executorch::runtime::Program::Verification::InternalConsistency);
    if (error == Error::Ok) *out = loaded.release();
    return error;
  });
}

void penstock_executorch_close(void* handle) { delete static_cast<Loaded*>(handle); }

int32_t penstock_executorch_methods(void* handle, void (*visit)(const char*)) {
  return to_status([&] {
    auto names = module_of(handle).method_names();
    if (!names.ok()) return names.error();
    for (const std::string& name : *names) visit(name.c_str());
    return Error::Ok;
  });
}

int32_t penstock_executorch_load_method(void* handle, const char* method) {
  return to_status([&] { return module_of(handle).load_method(method); });
}

// Shows outputs one by one; they belong to ExecuTorch, until the next call.
int32_t penstock_executorch_execute(void* handle, const char* method, const Value* inputs, int64_t input_count,
                                    void (*visit)(const Value*)) {
  return to_status([&] {
    std::vector<TensorPtr> tensors;
    std::vector<EValue> values;
    for (int64_t i = 0; i < input_count; ++i) values.push_back(value_of(inputs[i], tensors));
    auto results = module_of(handle).execute(method, values);
    if (!results.ok()) return results.error();
    for (const EValue& result : *results) show(result, visit);
    return Error::Ok;
  });
}

// Shows the names of a method's mutable buffers, if the program has them.
int32_t penstock_executorch_states(void* handle, const char* method, void (*visit)(const char*)) {
  return to_status([&] {
    auto meta = module_of(handle).method_meta(method);
    if (!meta.ok()) return meta.error();
    for (size_t i = 0; i < meta->num_attributes(); ++i) {
      auto info = meta->attribute_tensor_meta(i);
      if (!info.ok()) return info.error();
      visit(std::string(info->name()).c_str());
    }
    return Error::Ok;
  });
}

// Shows the memory itself, valid as long as the method is loaded.
int32_t penstock_executorch_state(void* handle, const char* method, const char* name, void (*visit)(const Value*)) {
  return to_status([&] {
    auto tensor = module_of(handle).loaded(method).get_attribute(name);
    if (!tensor.ok()) return tensor.error();
    show_tensor(*tensor, visit);
    return Error::Ok;
  });
}

// Shows each program of ours in the file: its description, and its code, a .pt2. No method needs to be loaded.
int32_t penstock_executorch_payloads(void* handle, void (*visit)(const char*, int64_t, const char*, int64_t)) {
  return to_status([&] {
    auto data = module_of(handle).program()->get_named_data_map();
    if (!data.ok()) return data.error() == Error::NotFound ? Error::Ok : data.error();
    auto count = (*data)->get_num_keys();
    if (!count.ok()) return count.error();
    for (uint32_t i = 0; i < *count; ++i) {
      auto key = (*data)->get_key(i);
      if (!key.ok()) return key.error();
      if (std::strncmp(*key, kPayload, std::strlen(kPayload)) != 0) continue;
      auto bytes = (*data)->get_data(*key);
      if (!bytes.ok()) return bytes.error();
      penstock_executorch::Payload payload = penstock_executorch::read_payload(bytes->data(), bytes->size());
      visit(payload.description, (int64_t)payload.description_bytes, payload.code, (int64_t)payload.code_bytes);
      bytes->Free();
    }
    return Error::Ok;
  });
}

// Makes delegates of the group, by number, use this session of the core. It counts them from 0 and outlives them.
int32_t penstock_executorch_share_session(const char* group, void* session, int32_t device_index,
                                          const int64_t* delegates, int64_t count) {
  return to_status([&] {
    penstock_executorch::sessions().share(group, std::make_shared<ProgramSession>(session, device_index),
                                          {delegates, delegates + count});
    return Error::Ok;
  });
}
// Shares the program's states, in its order and in the caller's memory, with all delegates of the group.
int32_t penstock_executorch_share_states(const char* group, const char* device, int32_t device_index,
                                         const Value* states, int64_t count) {
  return to_status([&] {
    std::vector<TensorView> views;
    for (const Value* state = states; state != states + count; ++state)
      views.push_back({state->data, state->scalar_type, {state->sizes, state->sizes + state->rank},
                       {state->strides, state->strides + state->rank}});
    penstock_executorch::states().share(group, std::make_shared<StateTable>(views, device, device_index), {});
    return Error::Ok;
  });
}
void penstock_executorch_reclaim(const char* group) {
  penstock_executorch::sessions().reclaim(group);
  penstock_executorch::states().reclaim(group);
}

int32_t penstock_executorch_read_state(const char* group, const char* name, void* to, int64_t bytes) {
  return to_status([&] {
    penstock_executorch::find_states(group)->read(name, to, bytes);
    return Error::Ok;
  });
}

int32_t penstock_executorch_write_state(const char* group, const char* name, const void* from, int64_t bytes) {
  return to_status([&] {
    penstock_executorch::find_states(group)->write(name, from, bytes);
    return Error::Ok;
  });
}

int32_t penstock_executorch_reset_state(const char* group) {
  return to_status([&] {
    penstock_executorch::find_states(group)->reset();
    return Error::Ok;
  });
}

int32_t penstock_executorch_link(const char* group, const char* delegate,
                                 void (*visit)(const PenstockLinkSample*, void*), void* context) {
  return to_status([&] {
    const std::vector<int64_t> numbers = penstock_executorch::only_session(group, delegate)->link();
    show_records(numbers, visit, context);
    return Error::Ok;
  });
}

int32_t penstock_executorch_start_trace(const char* group, const char* delegate) {
  return to_status([&] {
    penstock_executorch::only_session(group, delegate)->start_trace();
    return Error::Ok;
  });
}

int32_t penstock_executorch_stop_trace(const char* group, const char* delegate,
                                       void (*visit)(const PenstockSpan*, void*), void* context) {
  return to_status([&] {
    const std::vector<int64_t> numbers = penstock_executorch::only_session(group, delegate)->stop_trace();
    show_records(numbers, visit, context);
    return Error::Ok;
  });
}

// The core's session of a group that borrows none, and eight numbers about it; null if there is none.
void* penstock_executorch_session(const char* group, int64_t* facts) {
  auto found = penstock_executorch::sessions().find(group);
  if (found.empty()) return nullptr;
  const penstock_executorch::SessionFacts known = found.front()->facts();
  std::memcpy(facts, &known, sizeof known);
  return found.front()->handle();
}

}  // extern "C"
