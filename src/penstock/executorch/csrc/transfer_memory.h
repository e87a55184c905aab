// Pinned host memory that the inputs and outputs of one method pass through, on their way between ExecuTorch's memory and
// the device. One block, made once, of the size that the most they can be takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock_executorch {

class TransferMemory {
 public:
  // Of the device of a session of the core, which outlives it. Throws LoadError(core) where it cannot be had.
  TransferMemory(void* session, int64_t bytes, const std::string& method);
  ~TransferMemory();
  TransferMemory(const TransferMemory&) = delete;
  TransferMemory& operator=(const TransferMemory&) = delete;

  // A run begins: all of it is free again.
  void rewind() { taken_bytes_ = 0; }
  // The next so many bytes; throws LoadError(package) where there are not as many, and the file has said too little.
  void* take(int64_t bytes);

 private:
  void* session_;
  int64_t bytes_;
  std::string method_;
  int64_t taken_bytes_ = 0;
  char* start_ = nullptr;
};

}  // namespace penstock_executorch
