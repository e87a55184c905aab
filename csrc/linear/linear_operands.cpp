// How the tensors of a call are read, and what is refused of them.
#include "linear/linear_operands.h"

#include <string>
#include <vector>

#include "abi/torch_abi.h"

namespace penstock {
namespace {

constexpr Address kKernelAlignment = 16;  // of the copy engine
constexpr Address kElementAlignment = 2;

void check(int32_t status) {
  if (status) throw TorchRefusal();
}

struct Layout {
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;

  explicit Layout(TensorHandle tensor) {
    check(torch_abi().get_dim(tensor, &rank));
    check(torch_abi().get_sizes(tensor, &sizes));
    check(torch_abi().get_strides(tensor, &strides));
    check(torch_abi().get_dtype(tensor, &dtype));
  }

  std::vector<int64_t> contiguous_strides() const {
    std::vector<int64_t> all((size_t)rank);
    int64_t step = 1;
    for (int64_t d = rank - 1; d >= 0; --d) {
      all[d] = step;
      step *= sizes[d];
    }
    return all;
  }

  bool is_contiguous() const {
    std::vector<int64_t> wanted = contiguous_strides();
    // What a dimension of one element has for a stride means nothing.
    for (int64_t d = 0; d < rank; ++d)
      if (sizes[d] > 1 && strides[d] != wanted[d]) return false;
    return true;
  }

  std::string text() const {
    std::string all = "(";
    for (int64_t d = 0; d < rank; ++d) all += (d ? ", " : "") + std::to_string(sizes[d]);
    return all + ") of torch's dtype " + std::to_string(dtype);
  }
};

}  // namespace

OwnedTensor::~OwnedTensor() {
  if (handle_) torch_abi().delete_tensor_object(handle_);
}

TensorHandle OwnedTensor::release() {
  TensorHandle handle = handle_;
  handle_ = nullptr;
  return handle;
}

LinearOperands::LinearOperands(const LinearRequest& request) : request_(request) {
  Layout x(request.x), weight(request.weight);
  bool fits = x.rank == 2 && weight.rank == 2 && x.sizes[1] == weight.sizes[1] && x.dtype == weight.dtype;
  if (!fits)
    throw CoreError(Failure::divergence, "the linear of access " + std::to_string(request.access) + " got x " +
                                             x.text() + " and the weight " + weight.text() +
                                             ": they make no product");
  tokens_ = x.sizes[0];
  rows_ = weight.sizes[0];
  depth_ = weight.sizes[1];
  dtype_ = weight.dtype;
  if (request.bias) {
    Layout bias(request.bias);
    if (bias.rank != 1 || bias.sizes[0] != rows_ || bias.dtype != dtype_)
      throw CoreError(Failure::divergence, "the linear of access " + std::to_string(request.access) + " got a bias " +
                                               bias.text() + " and the weight " + weight.text());
  }
  check(torch_abi().get_device_index(request.x, &device_index_));
  const int64_t sizes[] = {tokens_, rows_}, strides[] = {rows_, 1};
  check(torch_abi().empty_strided(2, sizes, strides, dtype_, request.device_type, device_index_, result_.out()));
}

bool LinearOperands::is_bf16() const { return dtype_ == torch_abi().dtype_bfloat16(); }

void LinearOperands::multiply() {
  const TorchAbi& torch = torch_abi();
  bool on_cpu = request_.device_type == torch.device_type_cpu();
  const TorchAbi::Products& products = on_cpu ? torch.cpu : torch.cuda;
  if (!products.mm) throw CoreError(Failure::torch, "this build of torch has no CUDA");
  int64_t offset = 0;
  check(torch.get_storage_offset(request_.weight, &offset));
  const int64_t sizes[] = {depth_, rows_}, strides[] = {1, depth_};
  OwnedTensor turned;
  check(torch.reinterpret(request_.weight, 2, sizes, strides, offset, turned.out()));
  if (request_.bias) check(products.addmm(result_.get(), request_.bias, request_.x, turned.get(), 1.0, 1.0));
  else check(products.mm(result_.get(), request_.x, turned.get()));
}

LinearCall LinearOperands::call() {
  require_half();
  LinearCall call{};
  call.x_address = address(laid_out(request_.x, x_copy_, kKernelAlignment));
  call.y_address = address(result_.get());
  if (request_.bias) call.bias_address = address(laid_out(request_.bias, bias_copy_, kElementAlignment));
  call.x_stride = depth_;
  call.y_stride = rows_;
  call.tokens = tokens_;
  call.depth = depth_;
  call.is_bf16 = is_bf16();
  return call;
}

void LinearOperands::require_half() const {
  if (is_bf16() || dtype_ == torch_abi().dtype_float16()) return;
  throw CoreError(Failure::usage, "the linear of access " + std::to_string(request_.access) + " is of torch's dtype " +
                                      std::to_string(dtype_) + "; a weight in two places needs bfloat16 (" +
                                      std::to_string(torch_abi().dtype_bfloat16()) + ") or float16 (" +
                                      std::to_string(torch_abi().dtype_float16()) + ")");
}

Address LinearOperands::address(TensorHandle tensor) const {
  void* data = nullptr;
  check(torch_abi().get_data_ptr(tensor, &data));
  return reinterpret_cast<Address>(data);
}

TensorHandle LinearOperands::laid_out(TensorHandle tensor, OwnedTensor& copy, Address alignment) const {
  Layout layout(tensor);
  if (layout.is_contiguous() && address(tensor) % alignment == 0) return tensor;
  std::vector<int64_t> strides = layout.contiguous_strides();
  check(torch_abi().empty_strided(layout.rank, layout.sizes, strides.data(), layout.dtype, request_.device_type,
                                  device_index_, copy.out()));
  check(torch_abi().copy(copy.get(), tensor, 0));
  return copy.get();
}

}  // namespace penstock
