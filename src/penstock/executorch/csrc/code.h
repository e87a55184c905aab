// Compiled code, loaded and called by torch's own C++ loader, as on the .pt2 path. This header includes neither torch
// nor ExecuTorch, because their headers define the same names.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace penstock_executorch {

// CPU memory that somebody else owns.
struct TensorView {
  void* data;
  int64_t scalar_type;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// "2.13": the version that compiled code must have been compiled for.
std::string torch_minor();
// What torch calls this CPU.
std::string cpu_capability();
// The GPU that torch uses now; throws LoadError(build) where it sees none.
int32_t current_device_index();
// The stream that torch launches on now; null on the CPU.
void* current_stream(const std::string& device, int32_t device_index);

// Returns GPU memory that torch's allocator holds unused to the driver, where pages for weights come from.
void give_back_cached_memory();

struct StateTensors;
class TransferMemory;

class CompiledCode {
 public:
  // `package` is a .pt2 in memory. While it is loaded it lies in a file, under a name that is never used again.
  CompiledCode(const char* package, size_t package_bytes, const std::string& content_name, const std::string& method,
               const std::string& device, int32_t device_index);
  ~CompiledCode();

  // Takes the states that the code reads and writes, by number. They come before the inputs.
  void take_states(const StateTensors& tensors, const std::vector<int64_t>& numbers);
  // Takes inputs, laid out with `strides` in `transfers`.
  void take_inputs(const std::vector<TensorView>& views, const std::vector<std::vector<int64_t>>& strides,
                   TransferMemory& transfers);
  // Moves what was taken to the device, where run() takes it. Call it before the session begins.
  void move_inputs();
  // Throws whatever compiled code throws.
  void run(void* stream);

  // What a CUDA graph is captured with, under a number of the caller's: memory for inputs like those that were moved,
  // which the graph reads, and the outputs, which it writes.
  void make_pass(int64_t number);
  void run_pass(int64_t number, void* stream);
  // Before a launch, fill_pass() copies the taken inputs in. After it, show_pass() makes its outputs those of the run.
  void fill_pass(int64_t number);
  void show_pass(int64_t number);
  void drop_pass(int64_t number);

  size_t output_count() const;
  std::vector<int64_t> output_sizes(size_t index) const;
  int64_t output_scalar_type(size_t index) const;
  // Copies all outputs through `transfers`; they have arrived when this returns.
  void copy_outputs(const std::vector<TensorView>& to, TransferMemory& transfers);
  // Call it after a failed run, too.
  void forget();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace penstock_executorch
