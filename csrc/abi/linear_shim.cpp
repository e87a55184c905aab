// What compiled code calls to multiply with a lent weight, and the default for sessions: the library's product.
#include <cstdio>

#include "abi/torch_abi.h"
#include "linear/linear_operands.h"

namespace penstock {

bool Session::linear(const LinearRequest& request, TensorHandle* out) {
  return attempt([&] { multiply(request, out); });
}

void Session::multiply(const LinearRequest& request, TensorHandle* out) {
  LinearOperands operands(request);
  operands.multiply();
  *out = operands.release_result();
}

namespace {

int32_t linear(const LinearRequest& request, TensorHandle* out) {
  Session* session = current_session();
  if (!session) {
    std::fprintf(stderr, "penstock: access %lld was multiplied with outside of a session\n", (long long)request.access);
    return 1;
  }
  return session->linear(request, out) ? 0 : 1;
}

}  // namespace
}  // namespace penstock

extern "C" {

// `bias` is null, or points to the handle.
int32_t aoti_torch_cpu_penstock_linear(void* x, void* weight, void** bias, int64_t access, void** out) {
  return penstock::linear({x, weight, bias ? *bias : nullptr, access, penstock::torch_abi().device_type_cpu()}, out);
}

int32_t aoti_torch_cuda_penstock_linear(void* x, void* weight, void** bias, int64_t access, void** out) {
  return penstock::linear({x, weight, bias ? *bias : nullptr, access, penstock::torch_abi().device_type_cuda()}, out);
}

}  // extern "C"
