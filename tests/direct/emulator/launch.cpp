// The core's launch of a prepared linear, over the emulated driver.
#include "cuda/cuda_linear.h"

extern "C" {

int cuTensorMapEncodeTiled(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                           const uint32_t*, int, int, int, int);
int cuLaunchKernelEx(const penstock::CudaLaunchConfig*, void*, void**, void**);

int launch_prepared(const penstock::LinearRecipe* recipe, uint64_t x, uint64_t y, uint64_t bias, int64_t x_stride,
                    int64_t y_stride, int64_t tokens, int64_t depth, int is_bf16, void* stream, const char** call) {
  penstock::CudaLibrary cuda;
  cuda.tensor_map_encode = cuTensorMapEncodeTiled;
  cuda.launch_kernel = cuLaunchKernelEx;
  penstock::LinearCall operands{x, y, bias, x_stride, y_stride, tokens, depth, is_bf16 != 0};
  penstock::CudaOutcome outcome = penstock::launch_linear(cuda, *recipe, operands, stream);
  *call = outcome.call;
  return outcome.code;
}
}
