// Finds torch's functions by name, once, in the torch that the process has loaded.
#include "abi/torch_abi.h"

#include <dlfcn.h>

#include <mutex>

namespace penstock {
namespace {

TorchAbi abi;
bool loaded = false;

// Looks up functions in one library, and remembers the first one that is missing.
struct Lookup {
  void* library;
  const char* missing = nullptr;

  template <typename Function>
  void find(const char* name, Function& out) {
    out = reinterpret_cast<Function>(dlsym(library, name));
    if (!out && !missing) missing = name;
  }
};

void find_cpu(Lookup& in) {
  in.find("aoti_torch_create_tensor_from_blob", abi.create_tensor_from_blob);
  in.find("aoti_torch_new_tensor_handle", abi.new_tensor_handle);
  in.find("aoti_torch_delete_tensor_object", abi.delete_tensor_object);
  in.find("aoti_torch_device_type_cpu", abi.device_type_cpu);
  in.find("aoti_torch_device_type_cuda", abi.device_type_cuda);
  in.find("aoti_torch_dtype_bfloat16", abi.dtype_bfloat16);
  in.find("aoti_torch_dtype_float16", abi.dtype_float16);
  in.find("aoti_torch_dtype_int32", abi.dtype_int32);
  in.find("aoti_torch_dtype_int64", abi.dtype_int64);
  in.find("aoti_torch_dtype_element_size", abi.dtype_element_size);
  in.find("aoti_torch_get_data_ptr", abi.get_data_ptr);
  in.find("aoti_torch_get_dim", abi.get_dim);
  in.find("aoti_torch_get_sizes", abi.get_sizes);
  in.find("aoti_torch_get_strides", abi.get_strides);
  in.find("aoti_torch_get_storage_offset", abi.get_storage_offset);
  in.find("aoti_torch_get_dtype", abi.get_dtype);
  in.find("aoti_torch_get_device_index", abi.get_device_index);
  in.find("aoti_torch_empty_strided", abi.empty_strided);
  in.find("aoti_torch__reinterpret_tensor", abi.reinterpret);
  in.find("aoti_torch_copy_", abi.copy);
  in.find("aoti_torch_zero_", abi.zero);
  in.find("aoti_torch_call_dispatcher", abi.call);
  in.find("aoti_torch_cpu_mm_out", abi.cpu.mm);
  in.find("aoti_torch_cpu_addmm_out", abi.cpu.addmm);
}

void find_cuda(Lookup& in) {
  in.find("aoti_torch_get_current_cuda_stream", abi.current_cuda_stream);
  in.find("aoti_torch_cuda_mm_out", abi.cuda.mm);
  in.find("aoti_torch_cuda_addmm_out", abi.cuda.addmm);
  in.find("aoti_torch_cuda_index_Tensor", abi.cuda_index);
}

}  // namespace

std::string load_torch_abi() {
  // Programs may be loaded in several threads at once.
  static std::mutex lock;
  std::lock_guard<std::mutex> hold(lock);
  if (loaded) return "";
  // NOLOAD: only the torch that the process already runs on will do.
  void* cpu = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (!cpu) return "libtorch_cpu.so is not loaded in this process: import torch first";
  Lookup on_cpu{cpu};
  find_cpu(on_cpu);
  if (on_cpu.missing) return std::string("libtorch_cpu.so has no function ") + on_cpu.missing;
  if (void* cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) {
    Lookup on_cuda{cuda};
    find_cuda(on_cuda);
    if (on_cuda.missing) return std::string("libtorch_cuda.so has no function ") + on_cuda.missing;
  }
  loaded = true;
  return "";
}

const TorchAbi& torch_abi() { return abi; }

}  // namespace penstock
