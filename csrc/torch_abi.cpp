#include "torch_abi.h"

#include <dlfcn.h>

namespace penstock {
namespace {

TorchAbi abi;
bool loaded = false;

template <typename Function>
bool find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(dlsym(library, name));
  return out != nullptr;
}

}  // namespace

std::string load_torch_abi() {
  if (loaded) return "";
  // NOLOAD: only the torch that the process already runs on will do.
  void* cpu = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (!cpu) return "libtorch_cpu.so is not loaded in this process: import torch first";
  for (auto [name, ok] : {
           std::pair<const char*, bool>{
               "aoti_torch_create_tensor_from_blob",
               find(cpu, "aoti_torch_create_tensor_from_blob", abi.create_tensor_from_blob)},
           {"aoti_torch_new_tensor_handle", find(cpu, "aoti_torch_new_tensor_handle", abi.new_tensor_handle)},
           {"aoti_torch_delete_tensor_object",
            find(cpu, "aoti_torch_delete_tensor_object", abi.delete_tensor_object)},
           {"aoti_torch_device_type_cpu", find(cpu, "aoti_torch_device_type_cpu", abi.device_type_cpu)},
           {"aoti_torch_device_type_cuda", find(cpu, "aoti_torch_device_type_cuda", abi.device_type_cuda)},
       }) {
    if (!ok) return std::string("libtorch_cpu.so has no function ") + name;
  }
  if (void* cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) {
    if (!find(cuda, "aoti_torch_get_current_cuda_stream", abi.current_cuda_stream))
      return "libtorch_cuda.so has no function aoti_torch_get_current_cuda_stream";
  }
  loaded = true;
  return "";
}

const TorchAbi& torch_abi() { return abi; }

}  // namespace penstock
