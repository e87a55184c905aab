// Pinned host memory that the inputs and outputs of one method pass through, on their way between ExecuTorch's memory
// and the device. One block, allocated once, for the largest inputs and outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock_executorch {

class TransferMemory {
 public:
  // For the device of a session of the core, which outlives it. Throws LoadError(core) if it cannot be had.
  TransferMemory(void* session, int64_t bytes, const std::string& method);
  ~TransferMemory();
  TransferMemory(const TransferMemory&) = delete;
  TransferMemory& operator=(const TransferMemory&) = delete;

  // Call it when a run begins: all of it is free again.
  void rewind() { taken_bytes_ = 0; }
  // The next `bytes` bytes. Throws LoadError(package) if fewer are left, because the file then said too little.
  void* take(int64_t bytes);

 private:
  void* session_;
  int64_t bytes_;
  std::string method_;
  int64_t taken_bytes_ = 0;
  char* start_ = nullptr;
};

}  // namespace penstock_executorch
