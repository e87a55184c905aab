// The tensors of a linear, through AOTInductor's C ABI.
#pragma once

#include "abi/tensor.h"
#include "linear/linear_recipe.h"

namespace penstock {

// Checked sizes, and a result to fill. Everything here throws TorchRefusal, or CoreError for tensors that make no
// product.
class LinearOperands {
 public:
  explicit LinearOperands(const LinearRequest& request);

  int64_t tokens() const { return tokens_; }
  int64_t rows() const { return rows_; }
  int64_t depth() const { return depth_; }
  bool is_bf16() const;

  // Writes the library's product into the result.
  void multiply();
  // The operands as our own kernels take them: 16-bit floats; x and the bias are copied unless contiguous and aligned.
  LinearCall call();

  TensorHandle release_result() { return result_.release(); }

 private:
  void require_half() const;

  const LinearRequest request_;
  int64_t tokens_ = 0;
  int64_t rows_ = 0;
  int64_t depth_ = 0;
  int32_t dtype_ = 0;
  TensorDevice device_{};
  OwnedTensor result_;
  OwnedTensor x_copy_;
  OwnedTensor bias_copy_;
};

}  // namespace penstock
