#include "state_table.h"

#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>

#include "core.h"
#include "load_error.h"
#include "state_tensors.h"

namespace penstock_executorch {
namespace {

at::Device device_of(const std::string& device, int32_t device_index) {
  return device == "cuda" ? at::Device(at::kCUDA, (c10::DeviceIndex)device_index) : at::Device(at::kCPU);
}

std::optional<at::Device> guarded(at::Device device) {
  return device.is_cpu() ? std::nullopt : std::optional(device);
}

void wait_for(at::Device device) {
  if (!device.is_cpu()) at::detail::getCUDAHooks().deviceSynchronize(device.index());
}

// As bytes: not every dtype can be filled or copied, but every one can be seen as these.
at::Tensor bytes_of(const at::Tensor& tensor, const std::vector<int64_t>& dim_order) {
  return tensor.permute(dim_order).reshape({-1}).view(at::kByte);
}

at::Tensor allocated(const StateFacts& state, at::Device device) {
  std::vector<int64_t> laid, back(state.shape.size());
  for (int64_t dim : state.dim_order) laid.push_back(state.shape[(size_t)dim]);
  for (size_t i = 0; i < state.dim_order.size(); ++i) back[(size_t)state.dim_order[i]] = (int64_t)i;
  try {
    auto options = at::TensorOptions().dtype(static_cast<c10::ScalarType>(state.scalar_type)).device(device);
    return at::empty(laid, options).permute(back);
  } catch (const std::exception& error) {
    constexpr int64_t kOutOfMemory = 2;  // as the core counts its failures
    throw LoadError(Kind::core, "state '" + state.name + "' needs " + format_bytes(state.bytes) + ", refused: " +
                                  error.what(), kOutOfMemory);
  }
}

void fill(const at::Tensor& target, const std::vector<char>& value) {
  if (value.empty()) {
    target.zero_();
    return;
  }
  target.copy_(at::from_blob(const_cast<char*>(value.data()), {(int64_t)value.size()}, at::kByte));
}

struct Registry {
  std::mutex lock;
  std::multimap<StateKey, std::weak_ptr<StateTable>> known;
  std::map<std::string, std::shared_ptr<StateTable>> lent;
};

// Never destroyed: delegates may go after static objects do.
Registry& registry() {
  static Registry* made = new Registry;
  return *made;
}

}  // namespace

StateTable::StateTable(const std::vector<StateFacts>& states, const FirstValue& first, const std::string& device,
                       int32_t device_index)
    : tensors_(std::make_unique<StateTensors>()), states_(states) {
  at::NoGradGuard no_grad;
  tensors_->device = device_of(device, device_index);
  c10::OptionalDeviceGuard on(guarded(tensors_->device));
  for (const StateFacts& state : states_) {
    first_.push_back(first(state));
    tensors_->each.push_back(allocated(state, tensors_->device));
  }
  reset();
}

StateTable::StateTable(const std::vector<TensorView>& lent, const std::string& device, int32_t device_index)
    : tensors_(std::make_unique<StateTensors>()), is_lent_(true) {
  tensors_->device = device_of(device, device_index);
  c10::OptionalDeviceGuard on(guarded(tensors_->device));
  for (const TensorView& view : lent)
    tensors_->each.push_back(at::from_blob(
        view.data, view.sizes, view.strides,
        at::TensorOptions().dtype(static_cast<c10::ScalarType>(view.scalar_type)).device(tensors_->device)));
}

StateTable::~StateTable() = default;

void StateTable::require_valid() const {
  if (!invalid_.empty())
    throw LoadError(Kind::state, "the state may be half written: " + invalid_ + "; reset it first");
}

void StateTable::mark_invalid(const std::string& reason) {
  if (!is_lent_) invalid_ = reason;
}

size_t StateTable::number_of(const std::string& name, int64_t bytes) const {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].name != name) continue;
    if (states_[i].bytes != bytes)
      throw LoadError(Kind::input, "state '" + name + "' was given " + std::to_string(bytes) + " bytes, it has " +
                                     std::to_string(states_[i].bytes));
    return i;
  }
  std::string names;
  for (const StateFacts& state : states_) names += (names.empty() ? "" : ", ") + state.name;
  throw LoadError(Kind::input, "there is no state '" + name + "'; the program has " + names);
}

void StateTable::read(const std::string& name, void* to, int64_t bytes) {
  std::lock_guard<std::mutex> alone(running_);
  const size_t number = number_of(name, bytes);
  require_valid();
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(guarded(tensors_->device));
  wait_for(tensors_->device);
  at::from_blob(to, {bytes}, at::kByte).copy_(bytes_of(tensors_->each[number], states_[number].dim_order));
}

void StateTable::write(const std::string& name, const void* from, int64_t bytes) {
  std::lock_guard<std::mutex> alone(running_);
  const size_t number = number_of(name, bytes);
  require_valid();
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(guarded(tensors_->device));
  wait_for(tensors_->device);
  invalid_ = "a write into '" + name + "' did not finish";
  bytes_of(tensors_->each[number], states_[number].dim_order)
      .copy_(at::from_blob(const_cast<void*>(from), {bytes}, at::kByte));
  wait_for(tensors_->device);
  invalid_.clear();
}

void StateTable::reset() {
  std::lock_guard<std::mutex> alone(running_);
  at::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on(guarded(tensors_->device));
  wait_for(tensors_->device);
  invalid_ = "a reset did not finish";
  for (size_t i = 0; i < states_.size(); ++i)
    fill(bytes_of(tensors_->each[i], states_[i].dim_order), first_[i]);
  wait_for(tensors_->device);
  invalid_.clear();
}

StateRef::~StateRef() {
  std::lock_guard<std::mutex> hold(registry().lock);
  table_->taken().erase(method_);
  table_.reset();
}

std::unique_ptr<StateRef> take_state_ref(const StateKey& key, int64_t method,
                                         const std::function<std::shared_ptr<StateTable>()>& make) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.lock);
  for (auto it = all.known.begin(); it != all.known.end();)
    it = it->second.expired() ? all.known.erase(it) : std::next(it);
  auto [begin, end] = all.known.equal_range(key);
  for (auto it = begin; it != end; ++it)
    if (std::shared_ptr<StateTable> table = it->second.lock())
      if (table->taken().insert(method).second) return std::make_unique<StateRef>(std::move(table), method);
  std::shared_ptr<StateTable> made = make();
  made->taken().insert(method);
  all.known.emplace(key, made);
  return std::make_unique<StateRef>(std::move(made), method);
}

void lend_states(const std::string& group, std::shared_ptr<StateTable> table) {
  std::lock_guard<std::mutex> hold(registry().lock);
  registry().lent[group] = std::move(table);
}

void reclaim_states(const std::string& group) {
  std::lock_guard<std::mutex> hold(registry().lock);
  registry().lent.erase(group);
}

std::unique_ptr<StateRef> take_lent_state_ref(const std::string& group, int64_t method) {
  std::lock_guard<std::mutex> hold(registry().lock);
  auto found = registry().lent.find(group);
  return found == registry().lent.end() ? nullptr : std::make_unique<StateRef>(found->second, method);
}

std::shared_ptr<StateTable> find_states(const std::string& group) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.lock);
  std::vector<std::shared_ptr<StateTable>> found;
  for (auto& [key, known] : all.known)
    if (std::get<3>(key) == group)
      if (auto table = known.lock()) found.push_back(std::move(table));
  if (found.size() != 1)
    throw LoadError(Kind::state, std::to_string(found.size()) + " loaded programs with state are of group '" + group +
                                   "', needs one: tell them apart by weight_offload_group");
  return found.front();
}

}  // namespace penstock_executorch
