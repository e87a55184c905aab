// The driver functions that the core calls, from libcuda.so.1, opened at run time: no CUDA toolkit is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock {

using DevicePointer = unsigned long long;  // CUdeviceptr
using DeviceStream = void*;                // CUstream

struct CudaDriver {
  int (*mem_alloc)(DevicePointer* out, size_t bytes) = nullptr;
  int (*mem_free)(DevicePointer pointer) = nullptr;
  int (*copy_to_device)(DevicePointer to, const void* from, size_t bytes, DeviceStream stream) = nullptr;
  int (*copy_to_host)(void* to, DevicePointer from, size_t bytes, DeviceStream stream) = nullptr;
  int (*fill)(DevicePointer to, unsigned char value, size_t bytes, DeviceStream stream) = nullptr;
  int (*synchronize)(DeviceStream stream) = nullptr;
  int (*error_string)(int code, const char** out) = nullptr;
};

// Empty on success, otherwise what is missing.
std::string load_cuda_driver();
const CudaDriver& cuda_driver();
std::string cuda_error_text(int code);

}  // namespace penstock
