// What the CUDA driver says about a device, asked before anything is made on it.
#pragma once

#include <cstdint>
#include <string>

#include "payload.h"

namespace penstock_executorch {

struct Gpu {
  std::string name;
  // "9.0"
  std::string capability;
};

// Throws LoadError(device) where there is no such device, and LoadError(build) where there is no driver.
Gpu describe_gpu(int32_t index);

// Compiled kernels run on the compute capability they were compiled for, and on no other. Throws LoadError(build).
void check_gpu(const Payload& payload, int32_t index);

}  // namespace penstock_executorch
