// Reads the tensors of a call, refuses those that do not fit, and makes the products that torch computes.
#include "experts/expert_operands.h"

#include <string>

#include "abi/torch_abi.h"
#include "experts/expert_calls.h"

namespace penstock {
namespace {

[[noreturn]] void refuse(int64_t access, const std::string& what) {
  throw CoreError(Failure::divergence, "the experts of access " + std::to_string(access) + " " + what);
}

void replace(OwnedTensor& result, OwnedTensor& by) {
  check_torch(torch_abi().delete_tensor_object(result.release()));
  *result.out() = by.release();
}

}  // namespace

RowsOperands::RowsOperands(const RowsRequest& request) : request_(request) {
  TensorLayout weight(request.weight), index(request.index);
  if (weight.rank < 2 || !weight.is_contiguous() || index.dtype != torch_abi().dtype_int64())
    refuse(request.access, "are " + weight.text() + ", asked for by " + index.text() +
                               "; needs stacked rows that lie one after the other, and 64-bit numbers");
  experts_ = weight.sizes[0];
  rows_ = index.elements();
  const auto element_bytes = (int64_t)torch_abi().dtype_element_size(weight.dtype);
  row_bytes_ = experts_ ? weight.elements() / experts_ * element_bytes : 0;
  if (experts_ < 1 || experts_ > kMostExperts || row_bytes_ < 1 || row_bytes_ % kExpertUnitBytes)
    refuse(request.access, "are " + weight.text() + "; needs 1 to " + std::to_string(kMostExperts) +
                               " rows of a multiple of " + std::to_string(kExpertUnitBytes) + " bytes");
  std::vector<int64_t> sizes(index.sizes, index.sizes + index.rank);
  sizes.insert(sizes.end(), weight.sizes + 1, weight.sizes + weight.rank);
  device_.type = request.device_type;
  check_torch(torch_abi().get_device_index(request.index, &device_.index));
  make_tensor(sizes, weight.dtype, device_, result_);
}

void RowsOperands::take_all() {
  if (request_.device_type == torch_abi().device_type_cpu()) {
    MoveCall call{};
    call.index = index();
    call.whole = whole();
    call.out = out();
    call.row_bytes = row_bytes_;
    call.experts = (int)experts_;
    call.rows = (int)rows_;
    move_experts(call);
    return;
  }
  if (!torch_abi().cuda_index) throw CoreError(Failure::torch, "this build of torch has no CUDA");
  const void* indices[] = {&request_.index};
  OwnedTensor taken;
  check_torch(torch_abi().cuda_index(request_.weight, indices, 1, taken.out()));
  replace(result_, taken);
}

GroupedOperands::GroupedOperands(const GroupedRequest& request) : request_(request) {
  TensorLayout x(request.x), weight(request.weight), ends(request.ends);
  const bool fits = x.rank == 2 && weight.rank == 3 && weight.is_contiguous() && ends.rank == 1 &&
                    ends.sizes[0] == weight.sizes[0] && ends.dtype == torch_abi().dtype_int32() &&
                    x.dtype == weight.dtype && x.sizes[1] == weight.sizes[request.is_linear ? 2 : 1];
  if (!fits)
    refuse(request.access, "are " + weight.text() + ", multiplied with " + x.text() + " by ends " + ends.text() +
                               ": they make no product");
  experts_ = weight.sizes[0];
  depth_ = x.sizes[1];
  columns_ = weight.sizes[request.is_linear ? 1 : 2];
  rows_ = x.sizes[0];
  dtype_ = weight.dtype;
  element_bytes_ = (int64_t)torch_abi().dtype_element_size(dtype_);
  const int64_t unit = kExpertUnitBytes;
  if (experts_ < 1 || experts_ > kMostExperts || depth_ * element_bytes_ % unit || columns_ * element_bytes_ % unit)
    refuse(request.access, "are " + weight.text() + "; needs 1 to " + std::to_string(kMostExperts) +
                               " experts, whose rows and columns have multiples of " + std::to_string(unit) + " bytes");
  device_.type = request.device_type;
  check_torch(torch_abi().get_device_index(request.x, &device_.index));
  make_tensor({rows_, columns_}, dtype_, device_, result_);
  // Rows behind the last expert's belong to no expert.
  check_torch(torch_abi().zero(result_.get()));
}

bool GroupedOperands::on_cpu() const { return request_.device_type == torch_abi().device_type_cpu(); }

void GroupedOperands::multiply_all() {
  if (!rows_) return;
  if (on_cpu()) return multiply_here(request_.weight, 0, experts_);
  OwnedTensor product;
  library_product(x(), request_.weight, experts_, laid_out(request_.ends, device_, sizeof(int32_t), ends_copy_),
                  product);
  replace(result_, product);
}

Address GroupedOperands::room(int64_t first, int64_t end) {
  if (!room_.get()) {
    room_experts_ = end - first;
    make_tensor({room_experts_, depth_ * columns_}, dtype_, device_, room_);
  }
  if (end - first > room_experts_) refuse(request_.access, "come in ever larger parts");
  return data_address(room_.get());
}

void GroupedOperands::make_shifted(int64_t count) {
  if (shifted_x_.get()) return;
  make_tensor({rows_, depth_}, dtype_, device_, shifted_x_);
  make_tensor({count}, torch_abi().dtype_int32(), device_, shifted_ends_);
}

void GroupedOperands::library_product(TensorHandle x, TensorHandle matrices, int64_t count, TensorHandle ends,
                                      OwnedTensor& out) const {
  const int64_t matrix = depth_ * columns_;
  const std::vector<int64_t> strides =
      request_.is_linear ? std::vector<int64_t>{matrix, 1, depth_} : std::vector<int64_t>{matrix, columns_, 1};
  OwnedTensor view;
  view_tensor(matrices, {count, depth_, columns_}, strides, 0, view);
  penstock::multiply_groups(x, view.get(), ends, out);
}

void GroupedOperands::multiply_here(TensorHandle matrices, int64_t first, int64_t end) {
  const auto* ends = reinterpret_cast<const int32_t*>(this->ends());
  const std::vector<int64_t> strides =
      request_.is_linear ? std::vector<int64_t>{1, depth_} : std::vector<int64_t>{columns_, 1};
  for (int64_t expert = first; expert < end; ++expert) {
    const int64_t begin = expert ? ends[expert - 1] : 0, count = ends[expert] - begin;
    if (count <= 0) continue;
    if (begin < 0 || ends[expert] > rows_) refuse(request_.access, "have rows beyond the last");
    OwnedTensor rows, matrix, results;
    view_tensor(x(), {count, depth_}, {depth_, 1}, begin * depth_, rows);
    view_tensor(matrices, {depth_, columns_}, strides, (expert - first) * depth_ * columns_, matrix);
    view_tensor(result_.get(), {count, columns_}, {columns_, 1}, begin * columns_, results);
    check_torch(torch_abi().cpu.mm(results.get(), rows.get(), matrix.get()));
  }
}

}  // namespace penstock
