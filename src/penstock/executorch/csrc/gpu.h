// What the CUDA driver says about a device, asked before anything is made on it.
#pragma once

#include <cstdint>
#include <string>

namespace penstock_executorch {

struct Gpu {
  std::string name;
  // "9.0"
  std::string capability;
};

// Throws LoadError(device) where there is no such device, and LoadError(build) where there is no driver.
Gpu describe_gpu(int32_t index);

}  // namespace penstock_executorch
