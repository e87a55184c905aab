// The tensors of a call that reads experts, through AOTInductor's C ABI.
#pragma once

#include "abi/tensor.h"

namespace penstock {

// Everything here throws TorchRefusal, or CoreError for tensors that do not fit.
class RowsOperands {
 public:
  explicit RowsOperands(const RowsRequest& request);

  int64_t rows() const { return rows_; }
  int64_t experts() const { return experts_; }
  int64_t row_bytes() const { return row_bytes_; }
  Address whole() const { return data_address(request_.weight); }
  Address index() { return data_address(laid_out(request_.index, device_, sizeof(int64_t), index_copy_)); }
  Address out() const { return data_address(result_.get()); }

  // For a weight that is whole at the address it was lent at.
  void take_all();
  TensorHandle release_result() { return result_.release(); }

 private:
  const RowsRequest request_;
  TensorDevice device_{};
  int64_t rows_ = 1;
  int64_t experts_ = 0;
  int64_t row_bytes_ = 0;
  OwnedTensor index_copy_;
  OwnedTensor result_;
};

// A product of groups of rows, which may be computed a few experts at a time.
class GroupedOperands {
 public:
  explicit GroupedOperands(const GroupedRequest& request);

  int64_t rows() const { return rows_; }
  int64_t experts() const { return experts_; }
  int64_t row_bytes() const { return depth_ * columns_ * element_bytes_; }
  Address whole() const { return data_address(request_.weight); }
  Address ends() { return data_address(laid_out(request_.ends, device_, sizeof(int32_t), ends_copy_)); }
  bool on_cpu() const;

  // With the whole weight, at the address it was lent at.
  void multiply_all();
  // Room for the matrices of experts [first, end), and the product with what was put there. On a GPU, `shift` moves
  // their rows to the beginning and puts the results back: shift(to, from, ends or 0, row_bytes).
  Address room(int64_t first, int64_t end);
  template <typename Shift>
  void multiply(int64_t first, int64_t end, Shift&& shift);

  TensorHandle release_result() { return result_.release(); }

 private:
  void multiply_here(TensorHandle matrices, int64_t first, int64_t end);
  void library_product(TensorHandle x, TensorHandle matrices, int64_t count, TensorHandle ends, OwnedTensor& out) const;
  TensorHandle x() { return laid_out(request_.x, device_, 16, x_copy_); }

  const GroupedRequest request_;
  TensorDevice device_{};
  int64_t experts_ = 0;
  int64_t depth_ = 0;
  int64_t columns_ = 0;
  int64_t rows_ = 0;
  int64_t element_bytes_ = 0;
  int32_t dtype_ = 0;
  OwnedTensor x_copy_;
  OwnedTensor ends_copy_;
  OwnedTensor room_;
  OwnedTensor shifted_x_;
  OwnedTensor shifted_ends_;
  OwnedTensor result_;
  int64_t room_experts_ = 0;

  void make_shifted(int64_t count);
};

template <typename Shift>
void GroupedOperands::multiply(int64_t first, int64_t end, Shift&& shift) {
  if (on_cpu()) return multiply_here(room_.get(), first, end);
  make_shifted(end - first);
  shift(data_address(shifted_x_.get()), data_address(x()), data_address(shifted_ends_.get()), depth_ * element_bytes_);
  OwnedTensor product, ends;
  view_tensor(shifted_ends_.get(), {end - first}, {1}, 0, ends);
  library_product(shifted_x_.get(), room_.get(), end - first, ends.get(), product);
  shift(data_address(result_.get()), data_address(product.get()), Address{0}, columns_ * element_bytes_);
}

}  // namespace penstock
