// Reads the tensors of a call, and refuses those that do not fit.
#include "linear/linear_operands.h"

#include <string>

#include "abi/torch_abi.h"

namespace penstock {
namespace {

constexpr Address kKernelAlignment = 16;  // of the copy engine
constexpr Address kElementAlignment = 2;

}  // namespace

LinearOperands::LinearOperands(const LinearRequest& request) : request_(request) {
  TensorLayout x(request.x), weight(request.weight);
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
    TensorLayout bias(request.bias);
    if (bias.rank != 1 || bias.sizes[0] != rows_ || bias.dtype != dtype_)
      throw CoreError(Failure::divergence, "the linear of access " + std::to_string(request.access) + " got a bias " +
                                               bias.text() + " and the weight " + weight.text());
  }
  device_.type = request.device_type;
  check_torch(torch_abi().get_device_index(request.x, &device_.index));
  make_tensor({tokens_, rows_}, dtype_, device_, result_);
}

bool LinearOperands::is_bf16() const { return dtype_ == torch_abi().dtype_bfloat16(); }

void LinearOperands::multiply() {
  const TorchAbi& torch = torch_abi();
  bool on_cpu = request_.device_type == torch.device_type_cpu();
  const TorchAbi::Products& products = on_cpu ? torch.cpu : torch.cuda;
  if (!products.mm) throw CoreError(Failure::torch, "this build of torch has no CUDA");
  OwnedTensor turned;
  view_tensor(request_.weight, {depth_, rows_}, {1, depth_}, 0, turned);
  if (request_.bias) check_torch(products.addmm(result_.get(), request_.bias, request_.x, turned.get(), 1.0, 1.0));
  else check_torch(products.mm(result_.get(), request_.x, turned.get()));
}

LinearCall LinearOperands::call() {
  require_half();
  LinearCall call{};
  call.x_address = data_address(laid_out(request_.x, device_, kKernelAlignment, x_copy_));
  call.y_address = data_address(result_.get());
  if (request_.bias) call.bias_address = data_address(laid_out(request_.bias, device_, kElementAlignment, bias_copy_));
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

}  // namespace penstock
