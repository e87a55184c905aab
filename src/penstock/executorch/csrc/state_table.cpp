// Owns the tensors of state, and reads and writes them between runs. Knows torch, not ExecuTorch.
#include "state_table.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <optional>

#include "core.h"
#include "graph_memory.h"
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
  if (!device.is_cpu()) wait_for_device(device.index());
}

// A tensor as bytes: not every dtype can be filled or copied, but every one can be viewed as bytes.
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
    throw LoadError(Failure::device_memory,
                    "state '" + state.name + "' needs " + format_bytes(state.bytes) + ", refused: " + error.what());
  }
}

void fill(const at::Tensor& target, const std::vector<char>& value) {
  if (value.empty()) {
    target.zero_();
    return;
  }
  target.copy_(at::from_blob(const_cast<char*>(value.data()), {(int64_t)value.size()}, at::kByte));
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

StateTable::StateTable(const std::vector<TensorView>& shared, const std::string& device, int32_t device_index)
    : tensors_(std::make_unique<StateTensors>()), is_shared_(true) {
  tensors_->device = device_of(device, device_index);
  c10::OptionalDeviceGuard on(guarded(tensors_->device));
  for (const TensorView& view : shared)
    tensors_->each.push_back(at::from_blob(
        view.data, view.sizes, view.strides,
        at::TensorOptions().dtype(static_cast<c10::ScalarType>(view.scalar_type)).device(tensors_->device)));
}

StateTable::~StateTable() = default;

void StateTable::require_valid() const {
  // Word for word as runtime/state.py has it.
  if (!invalid_.empty())
    throw LoadError(Kind::state, "the state (" + joined(states_, [](const StateFacts& state) { return state.name; }) +
                                   ") may be half written: " + invalid_ + "; call reset_state() first");
}

void StateTable::mark_invalid(const std::string& method, const char* failure) noexcept {
  if (is_shared_) return;
  invalid_ = "a run failed";  // short enough to need no allocation
  try {
    invalid_ = "method '" + method + "' failed: " + failure;
  } catch (const std::bad_alloc&) {
    // Then the short text has to do.
  }
}

size_t StateTable::number_of(const std::string& name, int64_t bytes) const {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].name != name) continue;
    if (states_[i].bytes != bytes)
      throw LoadError(Kind::input, "state '" + name + "' was given " + std::to_string(bytes) + " bytes, it has " +
                                     std::to_string(states_[i].bytes));
    return i;
  }
  throw LoadError(Kind::input, "there is no state '" + name + "'; the program has " +
                                 joined(states_, [](const StateFacts& state) { return state.name; }));
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
  invalid_ = "write_state('" + name + "') did not finish";
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
  invalid_ = "reset_state() did not finish";
  for (size_t i = 0; i < states_.size(); ++i)
    fill(bytes_of(tensors_->each[i], states_[i].dim_order), first_[i]);
  wait_for(tensors_->device);
  invalid_.clear();
}

// Never destroyed: delegates may outlive static objects.
States& states() {
  static States* made = new States;
  return *made;
}

std::shared_ptr<StateTable> find_states(const std::string& group) {
  auto found = states().find(group);
  if (found.size() != 1)
    throw LoadError(Kind::state, std::to_string(found.size()) + " loaded programs with state are of group '" + group +
                                   "', needs one: tell them apart by weight_offload_group");
  return found.front();
}

}  // namespace penstock_executorch
