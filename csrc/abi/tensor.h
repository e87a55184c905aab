// Tensors that torch made and that the core owns or reads, through AOTInductor's C ABI.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "session/session.h"

namespace penstock {

// A call into torch failed. Torch itself has reported why.
class TorchRefusal final : public std::exception {};

inline void check_torch(int32_t status) {
  if (status) throw TorchRefusal();
}

class OwnedTensor {
 public:
  OwnedTensor() = default;
  ~OwnedTensor();
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;

  TensorHandle get() const { return handle_; }
  TensorHandle release();
  // Write it only once.
  TensorHandle* out() { return &handle_; }

 private:
  TensorHandle handle_ = nullptr;
};

// Sizes and strides, borrowed from the tensor.
struct TensorLayout {
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;

  explicit TensorLayout(TensorHandle tensor);
  std::vector<int64_t> contiguous_strides() const;
  bool is_contiguous() const;
  int64_t elements() const;
  std::string text() const;
};

struct TensorDevice {
  int32_t type;
  int32_t index;
};

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);
Address data_address(TensorHandle tensor);
// The values are uninitialized.
void make_tensor(const std::vector<int64_t>& sizes, int32_t dtype, TensorDevice device, OwnedTensor& out);
// A view of the same memory, starting `offset` elements in.
void view_tensor(TensorHandle tensor, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                 int64_t offset, OwnedTensor& out);
// torch's grouped product: each group of rows times its own matrix. Rows after the last group hold arbitrary values.
void multiply_groups(TensorHandle rows, TensorHandle matrices, TensorHandle ends, OwnedTensor& out);
// The tensor, or a copy of it if it is not contiguous or does not start at a multiple of `alignment`. The copy is made
// the first time: a product asks for its rows once for every expert.
TensorHandle laid_out(TensorHandle tensor, TensorDevice device, Address alignment, OwnedTensor& copy);

}  // namespace penstock
