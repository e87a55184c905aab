// The functions of libcuda.so.1 that the core calls, opened at run time: no CUDA toolkit is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock {

using DevicePointer = unsigned long long;  // CUdeviceptr
using DeviceStream = void*;                // CUstream

// The driver's own structures, in its layout (CUDA 11.2 and later; the sizes are fixed by its binary interface).
struct CudaLocation {
  int type;
  int id;
};
struct CudaAllocationProperties {
  int type;
  int handle_types;
  CudaLocation location;
  void* handle_metadata;
  unsigned char flags[8];
};
struct CudaAccess {
  CudaLocation location;
  int flags;
};
struct CudaPoolProperties {
  int type;
  int handle_types;
  CudaLocation location;
  void* security_attributes;
  size_t max_bytes;
  unsigned short usage;
  unsigned char reserved[54];
};
struct CudaLaunchAttribute {
  int id;
  unsigned char pad[4];
  unsigned value[16];
};
struct CudaLaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  DeviceStream stream;
  CudaLaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(CudaLaunchAttribute) == 72, "CUlaunchAttribute");
static_assert(sizeof(CudaLaunchConfig) == 56 && offsetof(CudaLaunchConfig, stream) == 32, "CUlaunchConfig");
static_assert(sizeof(CudaAllocationProperties) == 32, "CUmemAllocationProp");
static_assert(sizeof(CudaPoolProperties) == 88, "CUmemPoolProps");

struct CudaLibrary {
  int (*init)(unsigned flags) = nullptr;
  int (*device_get)(int* out, int ordinal) = nullptr;
  int (*primary_context_retain)(void** out, int device) = nullptr;
  int (*primary_context_release)(int device) = nullptr;
  int (*context_push)(void* context) = nullptr;
  int (*context_pop)(void** out) = nullptr;
  int (*memory_info)(size_t* free_bytes, size_t* total_bytes) = nullptr;
  int (*device_attribute)(int* out, int attribute, int device) = nullptr;

  int (*mem_alloc)(DevicePointer* out, size_t bytes) = nullptr;
  int (*mem_free)(DevicePointer pointer) = nullptr;
  int (*copy_to_device)(DevicePointer to, const void* from, size_t bytes, DeviceStream stream) = nullptr;
  int (*copy_to_host)(void* to, DevicePointer from, size_t bytes, DeviceStream stream) = nullptr;
  int (*fill)(DevicePointer to, unsigned char value, size_t bytes, DeviceStream stream) = nullptr;

  int (*granularity)(size_t* out, const CudaAllocationProperties* properties, int option) = nullptr;
  int (*create)(unsigned long long* out, size_t bytes, const CudaAllocationProperties*, unsigned long long) = nullptr;
  int (*release)(unsigned long long handle) = nullptr;
  int (*reserve)(DevicePointer* out, size_t bytes, size_t alignment, DevicePointer, unsigned long long) = nullptr;
  int (*unreserve)(DevicePointer pointer, size_t bytes) = nullptr;
  int (*map)(DevicePointer pointer, size_t bytes, size_t offset, unsigned long long handle, unsigned long long) = nullptr;
  int (*unmap)(DevicePointer pointer, size_t bytes) = nullptr;
  int (*set_access)(DevicePointer pointer, size_t bytes, const CudaAccess*, size_t count) = nullptr;

  int (*pool_create)(void** out, const CudaPoolProperties*) = nullptr;
  int (*pool_destroy)(void* pool) = nullptr;
  int (*pool_set)(void* pool, int attribute, void* value) = nullptr;
  int (*pool_get)(void* pool, int attribute, void* value) = nullptr;
  int (*pool_allocate)(DevicePointer* out, size_t bytes, void* pool, DeviceStream stream) = nullptr;
  int (*pool_release)(DevicePointer pointer, DeviceStream stream) = nullptr;

  int (*stream_priorities)(int* least, int* greatest) = nullptr;
  int (*stream_create)(DeviceStream* out, unsigned flags, int priority) = nullptr;
  int (*stream_destroy)(DeviceStream stream) = nullptr;
  int (*synchronize)(DeviceStream stream) = nullptr;
  int (*stream_wait)(DeviceStream stream, void* event, unsigned flags) = nullptr;
  int (*stream_is_capturing)(DeviceStream stream, int* out) = nullptr;
  int (*begin_capture)(DeviceStream stream, int mode) = nullptr;
  int (*end_capture)(DeviceStream stream, void** graph) = nullptr;
  int (*graph_instantiate)(void** out, void* graph, unsigned long long flags) = nullptr;
  int (*graph_launch)(void* instance, DeviceStream stream) = nullptr;
  int (*graph_destroy)(void* graph) = nullptr;
  int (*graph_instance_destroy)(void* instance) = nullptr;
  int (*event_create)(void** out, unsigned flags) = nullptr;
  int (*event_destroy)(void* event) = nullptr;
  int (*event_record)(void* event, DeviceStream stream) = nullptr;
  int (*event_record_with_flags)(void* event, DeviceStream stream, unsigned flags) = nullptr;
  int (*event_synchronize)(void* event) = nullptr;
  int (*event_query)(void* event) = nullptr;
  int (*event_elapsed)(float* milliseconds, void* from, void* to) = nullptr;

  int (*tensor_map_encode)(void* out, int data_type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides_bytes, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) = nullptr;
  int (*launch_kernel)(const CudaLaunchConfig* config, void* function, void** arguments, void** extra) = nullptr;
  int (*module_load)(void** out, const void* image) = nullptr;
  int (*module_unload)(void* module) = nullptr;
  int (*module_function)(void** out, void* module, const char* name) = nullptr;

  int (*host_register)(void* start, size_t bytes, unsigned flags) = nullptr;
  int (*host_unregister)(void* start) = nullptr;
  int (*host_device_pointer)(DevicePointer* out, void* start, unsigned flags) = nullptr;
  int (*host_alloc)(void** out, size_t bytes, unsigned flags) = nullptr;
  int (*host_free)(void* start) = nullptr;

  int (*error_string)(int code, const char** out) = nullptr;
};

// Empty on success, otherwise what is missing.
std::string load_cuda_library();
const CudaLibrary& cuda_library();
std::string cuda_error_text(int code);

}  // namespace penstock
