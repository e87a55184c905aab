// The few functions of AOTInductor's C ABI that the core calls, found at run time in the torch that the process has
// loaded. Linking to torch would tie one build of the core to one build of torch.
#pragma once

#include <cstdint>
#include <string>

namespace penstock {

struct TorchAbi {
  int32_t (*create_tensor_from_blob)(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides,
                                     int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                     void** out) = nullptr;
  // A second handle to the same tensor.
  int32_t (*new_tensor_handle)(void* tensor, void** out) = nullptr;
  int32_t (*delete_tensor_object)(void* tensor) = nullptr;
  int32_t (*device_type_cpu)() = nullptr;
  int32_t (*device_type_cuda)() = nullptr;
  // Null in a build of torch without CUDA.
  int32_t (*current_cuda_stream)(int32_t device_index, void** out) = nullptr;
};

// Empty on success, otherwise what is missing.
std::string load_torch_abi();
const TorchAbi& torch_abi();

}  // namespace penstock
