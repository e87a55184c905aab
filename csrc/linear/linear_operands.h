// The tensors of a linear, through AOTInductor's C ABI.
#pragma once

#include <exception>

#include "linear/linear_recipe.h"
#include "session/session.h"

namespace penstock {

// A call into torch failed. Torch itself has told why.
class TorchRefusal final : public std::exception {};

class OwnedTensor {
 public:
  OwnedTensor() = default;
  ~OwnedTensor();
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;

  TensorHandle get() const { return handle_; }
  TensorHandle release();
  // To be written once.
  TensorHandle* out() { return &handle_; }

 private:
  TensorHandle handle_ = nullptr;
};

// Sizes that were checked, and a result to be filled. All of it throws TorchRefusal, or CoreError for tensors that make
// no product.
class LinearOperands {
 public:
  explicit LinearOperands(const LinearRequest& request);

  int64_t tokens() const { return tokens_; }
  int64_t rows() const { return rows_; }
  int64_t depth() const { return depth_; }
  bool is_bf16() const;

  // The library's product into the result.
  void multiply();
  // Operands as our own kernels take them: 16-bit floats, x and the bias copied if they do not lie as they must.
  LinearCall call();

  TensorHandle release_result() { return result_.release(); }

 private:
  void require_half() const;
  Address address(TensorHandle tensor) const;
  TensorHandle laid_out(TensorHandle tensor, OwnedTensor& copy, Address alignment) const;

  const LinearRequest request_;
  int64_t tokens_ = 0;
  int64_t rows_ = 0;
  int64_t depth_ = 0;
  int32_t dtype_ = 0;
  int32_t device_index_ = 0;
  OwnedTensor result_;
  OwnedTensor x_copy_;
  OwnedTensor bias_copy_;
};

}  // namespace penstock
