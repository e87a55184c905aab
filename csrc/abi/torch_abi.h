// The few functions of AOTInductor's C ABI that the core calls, found at run time in the torch that the process has
// loaded. Linking to torch would tie one build of the core to one build of torch.
#pragma once

#include <cstddef>
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
  int32_t (*dtype_bfloat16)() = nullptr;
  int32_t (*dtype_float16)() = nullptr;
  int32_t (*dtype_int32)() = nullptr;
  int32_t (*dtype_int64)() = nullptr;
  size_t (*dtype_element_size)(int32_t dtype) = nullptr;

  // What the get_ functions return is borrowed from the tensor.
  int32_t (*get_data_ptr)(void* tensor, void** out) = nullptr;
  int32_t (*get_dim)(void* tensor, int64_t* out) = nullptr;
  int32_t (*get_sizes)(void* tensor, int64_t** out) = nullptr;
  int32_t (*get_strides)(void* tensor, int64_t** out) = nullptr;
  int32_t (*get_storage_offset)(void* tensor, int64_t* out) = nullptr;
  int32_t (*get_dtype)(void* tensor, int32_t* out) = nullptr;
  int32_t (*get_device_index)(void* tensor, int32_t* out) = nullptr;
  int32_t (*empty_strided)(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                           int32_t device_type, int32_t device_index, void** out) = nullptr;
  int32_t (*reinterpret)(void* tensor, int64_t rank, const int64_t* sizes, const int64_t* strides,
                         int64_t storage_offset, void** out) = nullptr;
  int32_t (*copy)(void* to, void* from, int32_t non_blocking) = nullptr;
  int32_t (*zero)(void* tensor) = nullptr;
  // Calls any op by name. It takes its arguments from the stack and leaves its results there.
  int32_t (*call)(const char* op, const char* overload, uint64_t* stack) = nullptr;
  // One for each device. CUDA's are null in a build of torch without CUDA.
  struct Products {
    int32_t (*mm)(void* out, void* left, void* right) = nullptr;
    int32_t (*addmm)(void* out, void* added, void* left, void* right, double beta, double alpha) = nullptr;
  };
  Products cpu, cuda;
  // Reads rows by index. On the CPU the core does this itself.
  int32_t (*cuda_index)(void* tensor, const void** indices, int64_t count, void** out) = nullptr;

  // Null in a build of torch without CUDA.
  int32_t (*current_cuda_stream)(int32_t device_index, void** out) = nullptr;
};

// Empty on success, otherwise what is missing.
std::string load_torch_abi();
const TorchAbi& torch_abi();

}  // namespace penstock
