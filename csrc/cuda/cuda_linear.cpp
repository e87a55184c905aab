// Fills in the part of a recipe that changes with each call, and launches it.
#include "cuda/cuda_linear.h"

namespace penstock {
namespace {

// CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
constexpr int kFloat16 = 6, kBfloat16 = 9;
constexpr int kNotInterleaved = 0;
constexpr int kSwizzle128Bytes = 3;
constexpr int kPromote256Bytes = 3;
constexpr int kZerosOutside = 0;
// CUlaunchAttributeID
constexpr int kClusterDimension = 4;
constexpr int64_t kElementBytes = 2;
constexpr uint32_t kBoxColumns = 64;

// A matrix with contiguous columns, copied in boxes of 64 columns (128 bytes, swizzled).
int encode_x(const CudaLibrary& cuda, const LinearRecipe& recipe, const LinearCall& call, TensorMap* map) {
  const uint64_t sizes[] = {(uint64_t)call.depth, (uint64_t)call.tokens};
  const uint64_t strides_bytes[] = {(uint64_t)(call.x_stride * kElementBytes)};
  const uint32_t box[] = {kBoxColumns, (uint32_t)recipe.x_box_rows};
  const uint32_t steps[] = {1, 1};
  return cuda.tensor_map_encode(map, call.is_bf16 ? kBfloat16 : kFloat16, 2, reinterpret_cast<void*>(call.x_address),
                                sizes, strides_bytes, box, steps, kNotInterleaved, kSwizzle128Bytes, kPromote256Bytes,
                                kZerosOutside);
}

}  // namespace

CudaOutcome launch_linear(const CudaLibrary& cuda, const LinearRecipe& recipe, const LinearCall& call,
                          DeviceStream stream) {
  SplitParams params = recipe.params;
  if (int code = encode_x(cuda, recipe, call, &params.x)) return {code, "cuTensorMapEncodeTiled"};
  params.y_address = call.y_address;
  params.y_stride = (int)call.y_stride;
  params.bias_address = call.bias_address;

  CudaLaunchAttribute cluster{};
  cluster.id = kClusterDimension;
  cluster.value[0] = (unsigned)recipe.cluster_ctas;
  cluster.value[1] = cluster.value[2] = 1;
  CudaLaunchConfig config{};
  config.grid[0] = (unsigned)recipe.blocks;
  config.block[0] = (unsigned)recipe.threads;
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.shared_bytes = (unsigned)recipe.shared_bytes;
  config.stream = stream;
  config.attributes = &cluster;
  config.attribute_count = 1;
  // The driver copies the parameters before it returns.
  void* arguments[] = {&params};
  int code = cuda.launch_kernel(&config, reinterpret_cast<void*>(recipe.function), arguments, nullptr);
  return {code, "cuLaunchKernelEx"};
}

}  // namespace penstock
