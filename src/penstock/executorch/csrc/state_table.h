// The state of a loaded program: its mutated buffers, by name, one of each for all methods and delegates, on their
// device. ExecuTorch never sees them. Like code.h, this header includes neither torch nor ExecuTorch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "code.h"
#include "payload.h"
#include "sharing.h"

namespace penstock_executorch {

struct StateTensors;

class StateTable {
 public:
  // The initial bytes of a state, in memory order; empty: it starts as zeros.
  using FirstValue = std::function<std::vector<char>(const StateFacts&)>;

  StateTable(const std::vector<StateFacts>& states, const FirstValue& first, const std::string& device,
             int32_t device_index);
  // Device memory of somebody else, who also tracks whether its content is whole.
  StateTable(const std::vector<TensorView>& shared, const std::string& device, int32_t device_index);
  ~StateTable();
  StateTable(const StateTable&) = delete;
  StateTable& operator=(const StateTable&) = delete;

  // The program's states, by number.
  const StateTensors& tensors() const { return *tensors_; }
  // Held by whoever runs a method with state, because delegates with sessions of their own share it, too.
  std::mutex& running() { return running_; }

  // Throws LoadError(state) after a failed run, until reset().
  void require_valid() const;
  void mark_invalid(const std::string& method, const char* failure) noexcept;
  // All three wait for the device; `bytes` must be the state's own. They throw LoadError(input or state).
  void read(const std::string& name, void* to, int64_t bytes);
  void write(const std::string& name, const void* from, int64_t bytes);
  void reset();

 private:
  size_t number_of(const std::string& name, int64_t bytes) const;

  std::unique_ptr<StateTensors> tensors_;
  std::vector<StateFacts> states_;
  std::vector<std::vector<char>> first_;
  bool is_shared_ = false;
  std::string invalid_;
  std::mutex running_;
};

// Program, file (two numbers), group, device.
using StateKey = std::tuple<std::string, uint64_t, uint64_t, std::string, int32_t>;

using States = Sharing<StateKey, StateTable>;
States& states();

// The only table that delegates of a group made; throws LoadError(state) where there is none, or more than one.
std::shared_ptr<StateTable> find_states(const std::string& group);

}  // namespace penstock_executorch
