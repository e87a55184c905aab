// Asks libcuda, which is found at run time.
#include "gpu.h"

#include <dlfcn.h>

#include "load_error.h"

namespace penstock_executorch {
namespace {

constexpr int kMajor = 75, kMinor = 76;

class CudaLibrary {
 public:
  CudaLibrary() : library_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL)) {
    if (library_) return;
    const char* reason = dlerror();
    throw LoadError(Kind::build, "the program was compiled for CUDA, and there is no CUDA driver on this machine: " +
                                   std::string(reason ? reason : "libcuda.so.1"));
  }

  template <typename... Arguments>
  void call(const char* name, Arguments... arguments) const {
    auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library_, name));
    if (!function) throw LoadError(Kind::build, std::string("the CUDA driver has no ") + name);
    if (int code = function(arguments...))
      throw LoadError(Kind::build, std::string(name) + " failed with CUDA error " + std::to_string(code));
  }

 private:
  void* library_;  // never closed: torch and the core use it, too
};

}  // namespace

Gpu describe_gpu(int32_t index) {
  CudaLibrary cuda;
  int count = 0, device = 0, major_number = 0, minor_number = 0;
  char name[256] = {};
  cuda.call("cuInit", 0u);
  cuda.call("cuDeviceGetCount", &count);
  if (index < 0 || index >= count)
    throw LoadError(Kind::device,
                  "there is no device cuda:" + std::to_string(index) + "; the driver sees " + std::to_string(count));
  cuda.call("cuDeviceGet", &device, (int)index);
  cuda.call("cuDeviceGetName", &name[0], (int)sizeof name - 1, device);
  cuda.call("cuDeviceGetAttribute", &major_number, kMajor, device);
  cuda.call("cuDeviceGetAttribute", &minor_number, kMinor, device);
  return {name, std::to_string(major_number) + "." + std::to_string(minor_number)};
}

}  // namespace penstock_executorch
