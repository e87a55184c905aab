// A separate program that registers one page of a file with a device and reports the result. On some machines
// registering a mapping never returns. A thread that waits in the driver cannot be stopped; a process can
// (open/registration_probe.h).
//
//     penstock_probe <path> <device index>
//
// Its last line is the outcome in words. It ends with 0 if the page was registered, and with kProbeRefused if not.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "probe/outcome.h"

namespace {

constexpr int kHostRegisterSupported = 99, kReadOnlyHostRegisterSupported = 113;
constexpr unsigned kRegisterReadOnly = 0x08;

struct Refusal {
  std::string text;
};

[[noreturn]] void cannot_map(const std::string& why) { throw Refusal{"one page of it could not be mapped: " + why}; }

size_t page_bytes() { return (size_t)sysconf(_SC_PAGESIZE); }

// Shared: a private mapping hangs the driver.
void* map_one_page(const char* path) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) cannot_map(std::strerror(errno));
  struct stat status;
  if (fstat(file, &status)) cannot_map(std::strerror(errno));
  if (status.st_size == 0) cannot_map("the file is empty");
  void* page = mmap(nullptr, page_bytes(), PROT_READ, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) cannot_map(std::strerror(errno));
  return page;
}

class Cuda {
 public:
  Cuda() : library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (!library_) throw Refusal{std::string("there is no CUDA driver on this machine: ") + dlerror()};
  }

  template <typename... Arguments>
  void call(const char* name, Arguments... arguments) const {
    if (const int code = found<int(Arguments...)>(name)(arguments...)) {
      const char* text = nullptr;
      found<int(int, const char**)>("cuGetErrorString")(code, &text);
      throw Refusal{std::string(name) + " failed: " + (text ? text : "unknown error") + " (" + std::to_string(code) +
                    ")"};
    }
  }

 private:
  template <typename Function>
  Function* found(const char* name) const {
    auto* function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (!function) throw Refusal{std::string("libcuda.so.1 has no function ") + name};
    return function;
  }

  void* library_;
};

void register_page(const Cuda& cuda, int device_index, void* page) {
  int device = 0, supported = 0;
  void* context = nullptr;
  cuda.call("cuInit", 0u);
  cuda.call("cuDeviceGet", &device, device_index);
  for (const int attribute : {kHostRegisterSupported, kReadOnlyHostRegisterSupported}) {
    cuda.call("cuDeviceGetAttribute", &supported, attribute, device);
    if (!supported)
      throw Refusal{std::string("the device does not support registering ") +
                    (attribute == kHostRegisterSupported ? "" : "read-only ") + "host memory (attribute " +
                    std::to_string(attribute) + " is 0)"};
  }
  cuda.call("cuDevicePrimaryCtxRetain", &context, device);
  cuda.call("cuCtxSetCurrent", context);
  cuda.call("cuMemHostRegister_v2", page, page_bytes(), kRegisterReadOnly);
  cuda.call("cuMemHostUnregister", page);
}

}  // namespace

int main(int count, char** arguments) {
  // If the process that asked dies, nobody is left to end this one.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
#ifdef SYS_close_range
  // If this process hangs where nothing can end it, it must not hold descriptors of the process that asked.
  syscall(SYS_close_range, 3u, ~0u, 0u);
#endif
  if (count != 3) {
    std::puts("usage: penstock_probe <path> <device index>");
    return penstock::kProbeRefused;
  }
  try {
    register_page(Cuda(), std::atoi(arguments[2]), map_one_page(arguments[1]));
  } catch (const Refusal& refusal) {
    std::puts(refusal.text.c_str());
    return penstock::kProbeRefused;
  }
  std::puts(penstock::kProbeSucceeded);
  return 0;
}
