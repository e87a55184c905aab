// Finds out whose BLAS torch's calls reach.
#include "blas.h"

#include <dlfcn.h>

#include <string>

#include "load_error.h"

namespace penstock_executorch {
namespace {

constexpr const char* kProduct = "sgemm_";

std::string library_of(void* symbol) {
  Dl_info found;
  return dladdr(symbol, &found) && found.dli_fname ? found.dli_fname : "an unknown library";
}

}  // namespace

void check_blas() {
  // In Python, torch is bound to its own BLAS at import, whatever is loaded later.
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized")) return;
  void* torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (!torch) return;
  void* own = dlsym(torch, kProduct);
  void* used = dlsym(RTLD_DEFAULT, kProduct);
  dlclose(torch);
  if (own && used && own != used)
    throw LoadError(Kind::build, library_of(used) + " takes the place of torch's BLAS, and results would differ in their "
                                                    "last bits; link libtorch_cpu.so before it");
}

}  // namespace penstock_executorch
