// Calls into torch that the core makes on a GPU only: torch has them for the CPU as well, and there they can be tried.
#include "abi/tensor.h"
#include "abi/torch_abi.h"

using namespace penstock;

extern "C" {

// Handles of AOTInductor's C ABI. 0, or what torch refused.
int32_t penstock_test_multiply_groups(void* rows, void* matrices, void* ends, void** out) {
  if (!load_torch_abi().empty()) return -1;
  try {
    OwnedTensor product;
    multiply_groups(rows, matrices, ends, product);
    *out = product.release();
    return 0;
  } catch (const TorchRefusal&) {
    return 1;
  }
}

}  // extern "C"
