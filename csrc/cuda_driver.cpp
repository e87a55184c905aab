#include "cuda_driver.h"

#include <dlfcn.h>

namespace penstock {
namespace {
CudaDriver driver;
bool loaded = false;
}  // namespace

std::string load_cuda_driver() {
  if (loaded) return "";
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return std::string("the CUDA driver cannot be opened: ") + dlerror();
  std::string missing;
  auto find = [&](const char* name, auto& out) {
    out = reinterpret_cast<std::decay_t<decltype(out)>>(dlsym(library, name));
    if (!out && missing.empty()) missing = std::string("libcuda.so.1 has no function ") + name;
  };
  find("cuMemAlloc_v2", driver.mem_alloc);
  find("cuMemFree_v2", driver.mem_free);
  find("cuMemcpyHtoDAsync_v2", driver.copy_to_device);
  find("cuMemcpyDtoHAsync_v2", driver.copy_to_host);
  find("cuMemsetD8Async", driver.fill);
  find("cuStreamSynchronize", driver.synchronize);
  find("cuGetErrorString", driver.error_string);
  loaded = missing.empty();
  return missing;
}

const CudaDriver& cuda_driver() { return driver; }

std::string cuda_error_text(int code) {
  const char* text = nullptr;
  if (driver.error_string && driver.error_string(code, &text) == 0 && text) return text;
  return "CUDA driver error " + std::to_string(code);
}

}  // namespace penstock
