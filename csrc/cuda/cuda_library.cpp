// Opens libcuda.so.1. Has the name and version of each function that the core calls.
#include "cuda/cuda_library.h"

#include <dlfcn.h>

#include <mutex>
#include <type_traits>

namespace penstock {
namespace {
CudaLibrary library;
bool loaded = false;
std::mutex loading;
}  // namespace

std::string load_cuda_library() {
  std::lock_guard<std::mutex> lock(loading);
  if (loaded) return "";
  void* handle = dlopen("libcuda.so.1", RTLD_NOW);
  if (!handle) return std::string("the CUDA driver cannot be opened: ") + dlerror();
  std::string missing;
  auto find = [&](const char* name, auto& out) {
    out = reinterpret_cast<std::decay_t<decltype(out)>>(dlsym(handle, name));
    if (!out && missing.empty()) missing = std::string("libcuda.so.1 has no function ") + name;
  };
  find("cuInit", library.init);
  find("cuDeviceGet", library.device_get);
  find("cuDevicePrimaryCtxRetain", library.primary_context_retain);
  find("cuDevicePrimaryCtxRelease_v2", library.primary_context_release);
  find("cuCtxPushCurrent_v2", library.context_push);
  find("cuCtxPopCurrent_v2", library.context_pop);
  find("cuMemGetInfo_v2", library.memory_info);
  find("cuDeviceGetAttribute", library.device_attribute);
  find("cuMemAlloc_v2", library.mem_alloc);
  find("cuMemFree_v2", library.mem_free);
  find("cuMemcpyHtoDAsync_v2", library.copy_to_device);
  find("cuMemcpyDtoHAsync_v2", library.copy_to_host);
  find("cuMemsetD8Async", library.fill);
  find("cuMemGetAllocationGranularity", library.granularity);
  find("cuMemCreate", library.create);
  find("cuMemRelease", library.release);
  find("cuMemAddressReserve", library.reserve);
  find("cuMemAddressFree", library.unreserve);
  find("cuMemMap", library.map);
  find("cuMemUnmap", library.unmap);
  find("cuMemSetAccess", library.set_access);
  find("cuMemPoolCreate", library.pool_create);
  find("cuMemPoolDestroy", library.pool_destroy);
  find("cuMemPoolSetAttribute", library.pool_set);
  find("cuMemPoolGetAttribute", library.pool_get);
  find("cuMemAllocFromPoolAsync", library.pool_allocate);
  find("cuMemFreeAsync", library.pool_release);
  find("cuCtxGetStreamPriorityRange", library.stream_priorities);
  find("cuStreamCreateWithPriority", library.stream_create);
  find("cuStreamDestroy_v2", library.stream_destroy);
  find("cuStreamSynchronize", library.synchronize);
  find("cuStreamWaitEvent", library.stream_wait);
  find("cuStreamIsCapturing", library.stream_is_capturing);
  find("cuStreamBeginCapture_v2", library.begin_capture);
  find("cuStreamEndCapture", library.end_capture);
  find("cuGraphInstantiateWithFlags", library.graph_instantiate);
  find("cuGraphLaunch", library.graph_launch);
  find("cuGraphDestroy", library.graph_destroy);
  find("cuGraphExecDestroy", library.graph_instance_destroy);
  find("cuEventCreate", library.event_create);
  find("cuEventDestroy_v2", library.event_destroy);
  find("cuEventRecord", library.event_record);
  find("cuEventRecordWithFlags", library.event_record_with_flags);
  find("cuEventSynchronize", library.event_synchronize);
  find("cuEventQuery", library.event_query);
  find("cuEventElapsedTime", library.event_elapsed);
  find("cuTensorMapEncodeTiled", library.tensor_map_encode);
  find("cuLaunchKernelEx", library.launch_kernel);
  find("cuModuleLoadData", library.module_load);
  find("cuModuleUnload", library.module_unload);
  find("cuModuleGetFunction", library.module_function);
  find("cuMemHostRegister_v2", library.host_register);
  find("cuMemHostUnregister", library.host_unregister);
  find("cuMemHostAlloc", library.host_alloc);
  find("cuMemFreeHost", library.host_free);
  find("cuMemHostGetDevicePointer_v2", library.host_device_pointer);
  find("cuGetErrorString", library.error_string);
  loaded = missing.empty();
  return missing;
}

const CudaLibrary& cuda_library() { return library; }

std::string cuda_error_text(int code) {
  const char* text = nullptr;
  if (library.error_string && library.error_string(code, &text) == 0 && text) return text;
  return "CUDA driver error " + std::to_string(code);
}

}  // namespace penstock
