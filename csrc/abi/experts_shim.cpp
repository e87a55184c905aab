// What compiled code calls to read experts, and the default for sessions that have all experts in the weight they lent.
#include <cstdio>

#include "abi/torch_abi.h"
#include "experts/expert_operands.h"

namespace penstock {

bool Session::rows(const RowsRequest& request, TensorHandle* out) {
  return attempt([&] { take_rows(request, out); });
}

bool Session::grouped(const GroupedRequest& request, TensorHandle* out) {
  return attempt([&] { multiply_groups(request, out); });
}

void Session::take_rows(const RowsRequest& request, TensorHandle* out) {
  RowsOperands operands(request);
  operands.take_all();
  *out = operands.release_result();
}

void Session::multiply_groups(const GroupedRequest& request, TensorHandle* out) {
  GroupedOperands operands(request);
  operands.multiply_all();
  *out = operands.release_result();
}

namespace {

Session* session_for(int64_t access) {
  Session* session = current_session();
  if (!session)
    std::fprintf(stderr, "penstock: the experts of access %lld were read outside of a session\n", (long long)access);
  return session;
}

int32_t rows(const RowsRequest& request, TensorHandle* out) {
  Session* session = session_for(request.access);
  return session && session->rows(request, out) ? 0 : 1;
}

int32_t grouped(const GroupedRequest& request, TensorHandle* out) {
  Session* session = session_for(request.access);
  return session && session->grouped(request, out) ? 0 : 1;
}

}  // namespace
}  // namespace penstock

extern "C" {

int32_t aoti_torch_cpu_penstock_rows(void* weight, void* index, int64_t access, void** out) {
  return penstock::rows({weight, index, access, penstock::torch_abi().device_type_cpu()}, out);
}

int32_t aoti_torch_cuda_penstock_rows(void* weight, void* index, int64_t access, void** out) {
  return penstock::rows({weight, index, access, penstock::torch_abi().device_type_cuda()}, out);
}

int32_t aoti_torch_cpu_penstock_grouped(void* x, void* weight, void* ends, int32_t is_linear, int64_t access,
                                        void** out) {
  return penstock::grouped({x, weight, ends, is_linear != 0, access, penstock::torch_abi().device_type_cpu()}, out);
}

int32_t aoti_torch_cuda_penstock_grouped(void* x, void* weight, void* ends, int32_t is_linear, int64_t access,
                                         void** out) {
  return penstock::grouped({x, weight, ends, is_linear != 0, access, penstock::torch_abi().device_type_cuda()}, out);
}

}  // extern "C"
